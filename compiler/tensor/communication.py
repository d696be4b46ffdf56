"""What the redistributions of a graph with layouts communicate, forward and in their transposes.

| node                      | forward          | transpose        |
|---------------------------|------------------|------------------|
| `planc.all_reduce`        | `all_reduce`     |                  |
| `planc.all_gather` to `R` | `all_gather`     |                  |
| `planc.all_gather` to `V` | `all_gather`     | `reduce_scatter` |
| `planc.reduce_scatter`    | `reduce_scatter` | `all_gather`     |
| `planc.all_to_all`        | `all_to_all`     | `all_to_all`     |
| `planc.vary`              |                  | `all_reduce`     |
| `planc.shard` from `R`    |                  | `all_gather`     |

What a rank sends in each is what the transports count, here in elements instead of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from compiler.ir.graph import Node, Value
from compiler.layout.factors import cut_factors
from compiler.layout.placement import Layout, Mesh, R, V, local_shape
from compiler.layout.rule import rule_of
from runtime.transport.calls import sent_bytes


@dataclass(frozen=True, order=True)
class Cost:
    """Ordered: elements that one rank sends (or the price of what else is not wanted) first, then collectives."""

    elements: int = 0
    collectives: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.elements + other.elements, self.collectives + other.collectives)


def communication(nodes: Iterable[Node], mesh: Mesh, axes: Collection[str]) -> Cost:
    """What the nodes communicate over these axes."""
    total = Cost()
    for node in nodes:
        if node.op.startswith("planc."):
            over, kinds = _collectives(node)
            if any(axis in axes for axis in over):
                total += _sent(kinds, node.outputs[0], mesh, over)
            total += _exchanged(node, mesh, axes)
    return total


def _collectives(node: Node) -> tuple[tuple[str, ...], list[str]]:
    """The axes over which a redistribution works, and its collectives forward and backward (see the table)."""
    kind, out = node.op.removeprefix("planc."), node.outputs[0]
    if kind not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "vary", "shard") or out is None:
        return (), []
    over = (node.args[1],) if isinstance(node.args[1], str) else tuple(node.args[1])
    before, after = (node.inputs[0].layout or Layout())[over[0]], (out.layout or Layout())[over[0]]
    forward = [] if kind in ("vary", "shard") else [kind]
    backward = {
        "all_gather": ["reduce_scatter"] if after == V else [],
        "reduce_scatter": ["all_gather"],
        "all_to_all": ["all_to_all"],
        "vary": ["all_reduce"],
        "shard": ["all_gather"] if before == R else [],
    }.get(kind, [])
    return over, [*forward, *(backward if out.differentiable else [])]


def _sent(kinds: Collection[str], out: Value | None, mesh: Mesh, over: Collection[str]) -> Cost:
    ways = math.prod(mesh.size(axis) for axis in over)
    size = elements_without(out, mesh, over) if out is not None else 0
    elements = sum(sent_bytes(kind, ways, size // ways if kind == "all_to_all" else size) for kind in kinds)
    return Cost(elements, len(kinds))


def _exchanged(node: Node, mesh: Mesh, axes: Collection[str]) -> Cost:
    """What an operator itself reduces where a factor is cut that it may have cut: as much as its results hold."""
    rule, total = rule_of(node), Cost()
    for value, dims in zip(node.inputs, rule.operands) if rule.collective else ():
        cuts = cut_factors(value.layout or Layout(), dims, rule, value.shape, mesh)
        over = tuple(axis for axis, factor in cuts.items() if factor in rule.collective and axis in axes)
        if over:
            total += sum((_sent(["all_reduce"], out, mesh, over) for out in node.outputs), Cost())
    return total


def elements_without(value: Value, mesh: Mesh, axes: Collection[str]) -> int:
    """The elements of a rank's part, were the value whole over `axes`."""
    kept = Layout((axis, place) for axis, place in (value.layout or Layout()).items() if axis not in axes)
    return math.prod(local_shape(value.shape, kept, mesh))
