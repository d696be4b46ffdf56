"""What the code of a segment costs on one rank: operations, bytes, communication, and the time on a machine.

Time is the sum of the operators' (`compiler.analysis.machine`), since each is a kernel of its own; a collective that is
started early is waited for only as long as the operators in between leave it, and of a product and its collective in n
pieces, all but one nth of the shorter runs behind the longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiler.analysis.flops import flops
from compiler.analysis.machine import Machine
from compiler.autodiff.partition import VIEWS, SegmentCode
from compiler.ir.graph import Node
from compiler.overlap.footprint import Footprint
from runtime.cuts import parse_cuts
from runtime.transport.calls import sent_bytes

if TYPE_CHECKING:
    from compiler.link import Kind

FREE = VIEWS | {"planc.after"}
"""Operators that move nothing."""

GATHERS = ("aten.embedding.", "aten.index.", "aten.index_select.", "aten.gather.")
"""Operators that read as much of their first operand as they return."""


IN_PIECES = {
    "planc.gather_matmul": "all_gather",
    "planc.matmul_scatter": "reduce_scatter",
    "planc.matmul_reduce": "all_reduce",
}
"""Products whose operand or result is communicated in pieces (`runtime.decomposition`)."""


@dataclass(frozen=True)
class Cost:
    """Of code that runs once: floating-point operations, bytes that operators read and write, bytes that the rank sends,
    seconds of computation, and seconds in all."""

    flops: int = 0
    bytes: int = 0
    sent: int = 0
    compute_s: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.sent + other.sent,
            self.compute_s + other.compute_s,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class KindCost:
    """Of one call of a kind: its forward, its backward, and the backward's two parts; and in bytes, what the forward
    saves, each of its results, and what lives only while one of them runs."""

    forward: Cost
    backward: Cost
    input: Cost
    weight: Cost
    saved_bytes: int
    result_bytes: tuple[int, ...]
    transient_bytes: int


def costs(kind: Kind, machine: Machine) -> KindCost:
    """What a kind's code costs."""
    code, split = kind.code, kind.split
    return KindCost(
        cost_of(code.forward, machine),
        cost_of(code.backward, machine),
        cost_of(split.input.nodes, machine),
        cost_of(split.weight.nodes, machine),
        sum(value.nbytes for value in code.saved),
        tuple(value.nbytes for value in code.results),
        transient_bytes(code),
    )


def transient_bytes(code: SegmentCode) -> int:
    """The most bytes that a call holds while it runs, beside its arguments and what it returns or was saved."""
    stays = dict.fromkeys([*code.results, *code.saved])
    forward = Footprint(code.forward, (), stays).peak(code.forward) - sum(value.nbytes for value in stays)
    given = [*code.saved, *code.cotangents]
    backward = Footprint(code.backward, given, code.gradients).peak(code.backward)
    return max(forward, backward - sum(value.nbytes for value in code.saved), 0)


def cost_of(nodes: Iterable[Node], machine: Machine) -> Cost:
    """What running local code costs."""
    total = Cost()
    now = link_free = 0.0  # seconds since the code began
    under_way: dict[object, float] = {}
    for node in nodes:
        if node.op == "planc.wait":
            now = max(now, under_way[node.args[0]])
        elif node.op in IN_PIECES:
            kind, axes, full = in_pieces(node)
            work, moved, pieces = node_flops(node), moved_bytes(node), node.args[-1]
            compute = machine.seconds(work, moved, dtype_of(node))
            link = pieces * machine.communication(kind, axes, full // pieces)
            now = link_free = max(now, link_free) + max(compute, link) + min(compute, link) / pieces
            total += Cost(work, moved, sent_bytes(kind, machine.ranks(axes), full), compute)
        elif (collective := communicates(node)) is not None:
            kind, axes, full = collective
            started = node.op.startswith("planc.start_")
            link_free = max(now, link_free) + machine.communication(kind, axes, full)
            if started:
                under_way[node.outputs[0]] = link_free
            else:
                now = link_free
            total += Cost(sent=sent_bytes(kind, machine.ranks(axes), full))
        else:
            work, moved = node_flops(node), moved_bytes(node)
            seconds = machine.seconds(work, moved, dtype_of(node))
            now += seconds
            total += Cost(work, moved, compute_s=seconds)
    return total + Cost(seconds=now)


def node_flops(node: Node) -> int:
    """Floating-point operations of a node."""
    return flops(node.op, node.args, node.outputs)


def moved_bytes(node: Node) -> int:
    """Bytes that a node reads and writes: none for a view."""
    if node.op in FREE:
        return 0
    written = sum(out.nbytes for out in node.outputs if out is not None)
    operands = list(dict.fromkeys(node.inputs))
    if node.op.startswith(GATHERS):
        return 2 * written + sum(value.nbytes for value in operands[1:])
    return written + sum(value.nbytes for value in operands)


def dtype_of(node: Node) -> str:
    """The dtype in which a node calculates: that of its first floating operand."""
    return next((v.dtype for v in node.inputs if "float" in v.dtype), "float32")


def communicates(node: Node) -> tuple[str, tuple[str, ...], int] | None:
    """Of a collective: its kind, axes, and bytes of the whole value."""
    if node.op in IN_PIECES:
        return in_pieces(node)
    kind = node.op.removeprefix("planc.").removeprefix("start_")
    if kind not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        return None
    given = node.args[1]
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        axes = tuple(axis for cut in parse_cuts(given) for axis in cut.axes)
    else:
        axes = (given,) if isinstance(given, str) else tuple(given)
    return kind, axes, max(value.nbytes for value in (*node.inputs, *node.outputs) if value is not None)


def in_pieces(node: Node) -> tuple[str, tuple[str, ...], int]:
    """The same of a product that is communicated in pieces."""
    kind = IN_PIECES[node.op]
    x, given = node.args[0], node.args[1 if kind == "all_gather" else 4]
    axes = parse_cuts(given)[0].axes if isinstance(given, str) else given
    product = next(out for out in reversed(node.outputs) if out is not None)
    columns = x.shape[-1] if kind == "all_gather" else node.args[1].shape[-1]
    rows = product.shape[0] if kind == "all_gather" else x.shape[0]
    return kind, axes, rows * columns * x.nbytes // math.prod(x.shape)
