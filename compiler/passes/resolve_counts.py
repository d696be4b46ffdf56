"""resolve_counts: how many elements a mean runs over, once it is known which dimensions the batch is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compiler.ir.graph import Graph, Node
from compiler.layout.placement import Shard


@dataclass(frozen=True)
class ResolveCounts:
    """Replace `planc.count` by a constant, or by a multiple of the number of real rows of the batch.

    before:  %n : float32[] {} = planc.count(%x, [0, 1])            # %x : float32[8, 16] {dp: S(0), micro: S(0)}
    after:   %n : float32[] {} = planc.rows(16.0)                   # 16 for each real row
             %n : float32[] {} = aten.full.default([], 128.0, …)    # where every row is real
    """

    time_axis: str | None = None
    rows: int = 0
    name: str = "resolve_counts"
    requires: frozenset[str] = frozenset({"layouts"})
    provides: frozenset[str] = frozenset({"counts_resolved"})

    def __call__(self, graph: Graph) -> Graph:
        for node in graph.nodes:
            if node.op == "planc.count":
                self.resolve(node)
        graph.remove_dead()
        return graph

    def resolve(self, node: Node) -> None:
        value, dims = node.args[0], node.args[1]
        out = node.outputs[0]
        assert out is not None
        total = math.prod(value.shape[dim] for dim in dims)
        place = value.layout[self.time_axis] if self.time_axis and self.rows else None
        # Where an entry holds several rows, the batch is always full (`assign_layouts`), and so the count is a constant.
        if isinstance(place, Shard) and place.dim in dims and total % self.rows == 0:
            node.op, node.args, node.kwargs = "planc.rows", (float(total // self.rows),), {}
        else:
            node.op, node.args = "aten.full.default", ((), float(total))
            node.kwargs = {"dtype": f"torch.{out.dtype}"}
