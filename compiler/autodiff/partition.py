"""Partitioning: what the forward keeps for the backward, and what the backward computes again.

Arguments (parameters, activations from other segments) are not saved but handed to the backward again. Of what else
the backward reads, a *policy* says what is saved; the rest is computed again from what is at hand. A view of
something at hand is always made again: it costs nothing and would keep its base alive.

Policies (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, for "selective"):

    none       everything that the backward reads is saved
    selective  results of matrix multiplications, convolutions and reductions are saved, the cheap rest is recomputed;
               what was gathered is gathered again, since the whole is as many times larger than what a rank holds
    full       nothing is saved: the backward starts from the segment's arguments
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.autodiff.trace import Recorded
from compiler.ir.graph import Node, Value, live

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "t.default", "transpose.int", "permute.default", "expand.default",
        "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "slice.Tensor", "select.int",
        "unfold.default", "as_strided.default", "diagonal.default", "unbind.int", "split.Tensor",
        "split_with_sizes.default",
    )
)  # fmt: skip

COSTLY = (
    "aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.convolution.", "planc.attention", "planc.opaque",
    "planc.all_reduce", "planc.reduce_scatter", "planc.all_to_all", "planc.cross_entropy", "planc.log_sum_exp",
)  # fmt: skip

PRODUCT = "planc.product_into"
"""A matrix product that is written into a bucket's buffer; its first argument is the gradient's position."""


@dataclass
class SegmentCode:
    """Local code of one distinct segment.

    forward:  arguments → (results, saved);  backward: (arguments it needs, saved, cotangents) → gradients.
    `needed` are the indices of the arguments that the backward reads again, `given` those of the results that have
    a cotangent, `wanted` those of the arguments that get a gradient. `ordered`: the code writes into memory that it has
    views of, so its order must stay.
    """

    arguments: list[Value]
    forward: list[Node]
    results: list[Value]
    saved: list[Value]
    needed: list[int]
    given: list[int]
    cotangents: list[Value]
    backward: list[Node]
    wanted: list[int]
    gradients: list[Value]
    meaning: dict[Value, Value]
    ordered: bool = False


def partition(recorded: Recorded, policy: str = "none") -> SegmentCode:
    """Split recorded code under a policy: "none", "selective" or "full"."""
    policy = "none" if recorded.writes else policy
    gradients = [value for value in recorded.gradients if value is not None]
    backward = live(recorded.backward, gradients)
    made = {out: node for node in recorded.forward for out in node.outputs if out is not None}
    needed_values: list[Value] = []
    again: dict[Node, None] = {}
    saved: dict[Value, None] = {}

    def require(value: Value) -> None:
        """Make a forward value available to the backward."""
        node = made.get(value)
        if node is None:
            needed_values.append(value)
            return
        if node in again or value in saved:
            return
        if (node.op not in VIEWS or recorded.writes) and not recomputes(node, policy):
            saved[value] = None
            return
        for operand in node.inputs:
            require(operand)
        again[node] = None

    own = {out for node in backward for out in node.outputs if out is not None} | set(
        value for value in recorded.cotangents if value is not None
    )
    for value in dict.fromkeys([v for node in backward for v in node.inputs] + gradients):
        if value not in own:
            require(value)
    products_into_buckets(recorded, backward)
    forward = live(recorded.forward, [*recorded.results, *saved])
    needed = set(needed_values) | {v for v in gradients if v in recorded.arguments}
    return SegmentCode(
        recorded.arguments,
        forward,
        recorded.results,
        list(saved),
        [k for k, value in enumerate(recorded.arguments) if value in needed],
        [k for k, value in enumerate(recorded.cotangents) if value is not None],
        [value for value in recorded.cotangents if value is not None],
        interleave(again, backward, made),
        [k for k, value in enumerate(recorded.gradients) if value is not None],
        gradients,
        recorded.layouts,
        recorded.writes,
    )


def interleave(again: Mapping[Node, None], backward: list[Node], made: Mapping[Value, Node]) -> list[Node]:
    """The backward with each repeated forward node right before its first use, so that its result lives shortly."""
    order: dict[Node, None] = {}

    def place(node: Node) -> None:
        for value in node.inputs:
            source = made.get(value)
            if source is not None and source in again and source not in order:
                place(source)
        order[node] = None

    for node in [*backward, *again]:
        if node not in order:
            place(node)
    return list(order)


def products_into_buckets(recorded: Recorded, backward: list[Node]) -> None:
    """A parameter's gradient that is a matrix product is written (or added) straight into its bucket's buffer.

    before:  d_w = aten.mm(d_y_t, x)                     # then copied into the bucket
    after:   d_w = ctx.product_into(1, d_y_t, x)         # gradient 1 of this code
    """
    wanted = [k for k, value in enumerate(recorded.gradients) if value is not None]
    uses = [value for node in backward for value in node.inputs] + [v for v in recorded.gradients if v is not None]
    for position, k in enumerate(wanted):
        value = recorded.gradients[k]
        assert value is not None
        node = value.producer
        plain = node is not None and node.op == "aten.mm.default" and uses.count(value) == 1
        if plain and recorded.arguments[k].kind == "param":
            assert node is not None
            node.op, node.args = PRODUCT, (position, *node.args)


def recomputes(node: Node, policy: str) -> bool:
    """Whether the policy computes this node again in the backward rather than keeping its results."""
    if policy == "none" or node.op.startswith("planc.opaque"):
        return False
    return policy == "full" or not node.op.startswith(COSTLY)
