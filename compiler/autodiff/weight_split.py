"""Splitting a backward in two: gradients of activations, which other ranks wait for, and gradients of parameters, which
only the optimizer does (Qi et al. 2024, https://arxiv.org/abs/2401.10241).

before:  backward(x, w, h, d_y) → d_x, d_w, d_g
             d_h = mm(d_y, w)
             d_w = product_into(1, d_y_t, h)
             d_x, d_g = native_layer_norm_backward(d_h, x, …)
after:   backward_input(x, w, h, d_y) → (d_x, d_g), (d_y, h)
             d_h = mm(d_y, w)
             d_x, d_g = native_layer_norm_backward(d_h, x, …)
         backward_weight(d_y, h) → d_w
             d_y_t = t(d_y)
             d_w = product_into(0, d_y_t, h)

The input part is what the gradients of activations depend on. The rest is the weight part, but for what is cheap and
would only keep memory busy until then: sums for a norm's weight, or a product that is recomputed from two kept factors.
The parts hand over *kept* values: what the weight part reads, but for parameters (which are at hand) and views (which
are made again). A slot that it reads is kept too, since the slot may be dropped between the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compiler.autodiff.partition import COSTLY, PRODUCT, VIEWS, SegmentCode
from compiler.ir.graph import Node, Value, live


@dataclass
class BackwardPart:
    """One of the two functions. `needed` are the indices of the segment's arguments that it gets, `wanted` those of the
    arguments whose `gradients` it returns."""

    needed: list[int]
    nodes: list[Node]
    wanted: list[int]
    gradients: list[Value]


@dataclass
class SplitBackward:
    """input: (arguments it needs, saved, cotangents) → (gradients, kept);  weight: (parameters, kept) → gradients.

    The weight part has no nodes where nothing could be put off.
    """

    input: BackwardPart
    weight: BackwardPart
    kept: list[Value]


def split_backward(code: SegmentCode) -> SplitBackward:
    """The two parts of a segment's backward. Code whose order must stay (`code.ordered`) is not cut: all is input."""
    if code.ordered:
        early = set(code.backward)
    else:
        activations = [g for k, g in zip(code.wanted, code.gradients) if code.arguments[k].kind != "param"]
        early = absorb(code, set(live(code.backward, activations)))
    weight, reads = weight_part(code, early)
    parameters = {value for value in code.arguments if value.kind == "param"}
    kept = [value for value in reads if value not in parameters]
    made = {out: node for node in code.backward for out in node.outputs if out is not None}
    pairs = list(zip(code.wanted, code.gradients))
    late = [(k, g) for k, g in pairs if g in made and made[g] not in early]
    rest = [pair for pair in pairs if pair not in late]
    nodes = [node for node in code.backward if node in early]
    here = {value for node in nodes for value in node.inputs}.union(kept, (g for _, g in rest))
    again = parameters.intersection(reads)
    return SplitBackward(
        _part([k for k in code.needed if code.arguments[k] in here], nodes, rest),
        _part([k for k in code.needed if code.arguments[k] in again], weight, late),
        kept,
    )


def weight_part(code: SegmentCode, early: set[Node]) -> tuple[list[Node], list[Value]]:
    """The nodes of the weight part, if `early` are those of the input part, and the values that it gets from outside."""
    made = {out: node for node in code.backward for out in node.outputs if out is not None}
    wanted = [g for g in code.gradients if g in made and made[g] not in early]
    nodes = live([node for node in code.backward if node not in early or node.op in VIEWS], wanted)
    own = {out for node in nodes for out in node.outputs}
    reads = dict.fromkeys(value for node in nodes for value in node.inputs)
    return nodes, [value for value in reads if value not in own]


def absorb(code: SegmentCode, early: set[Node]) -> set[Node]:
    """The input part with what is better done there: cheap nodes whose results are smaller than their operands."""
    nodes, reads = weight_part(code, early)
    size = bytes_of(reads)
    for node in reversed(nodes):
        if node in early:
            continue
        late = [other for other in code.backward if other not in early]
        chain = live(late, [out for out in node.outputs if out is not None])
        if any(other.op.startswith((*COSTLY, PRODUCT)) for other in chain):
            continue
        trial = early.union(chain)
        smaller = bytes_of(weight_part(code, trial)[1])
        if smaller < size:
            early, size = trial, smaller
    return early


def bytes_of(values: Iterable[Value]) -> int:
    """Bytes of values, parameters left out."""
    return sum(value.nbytes for value in values if value.kind != "param")


def _part(needed: list[int], nodes: list[Node], pairs: Sequence[tuple[int, Value]]) -> BackwardPart:
    """Products that go into a bucket count the gradients of their own part."""
    gradients = [gradient for _, gradient in pairs]

    def placed(node: Node) -> Node:
        if node.op != PRODUCT:
            return node
        arguments = (gradients.index(node.outputs[0]), *node.args[1:])
        return Node(node.op, arguments, node.kwargs, node.outputs, node.origin, node.source)

    return BackwardPart(needed, [placed(node) for node in nodes], [k for k, _ in pairs], gradients)
