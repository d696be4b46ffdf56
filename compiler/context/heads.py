"""expand_heads: key and value heads for all-to-all attention.

All-to-all divides the key/value heads among the ranks. Where there are fewer of them than ranks, each is repeated as
often as needed, which its group of query heads allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from compiler.ir.graph import Graph, Node, Value
from compiler.passes.lower_support import LoweringError


@dataclass(frozen=True)
class ExpandHeads:
    """`ways` ranks share the heads by all-to-all, each tensor-parallel rank's of `others` among themselves.

    before:  %a = planc.attention(%q, %k, %v, …)           # %q : [8, 8, 64, 4], %k : [8, 2, 64, 4], ways = 4
    after:   %k.wide : float32[8, 2, 2, 64, 4] = aten.expand.default(…)
             %k.heads : float32[8, 4, 64, 4] = aten.view.default(%k.wide, …)
             %a = planc.attention(%q, %k.heads, %v.heads, …)
    """

    ways: int
    others: int = 1
    name: str = "expand_heads"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"heads_expanded"})

    def __call__(self, graph: Graph) -> Graph:
        taken = {value.name for value in graph.values()}
        nodes: list[Node] = []
        made: dict[tuple[Value, int], Value] = {}
        for node in graph.nodes:
            if node.op == "planc.attention" and len(node.args[0].shape) > 2 and self.ways > 1:
                times = self.times(node)
                if times > 1:
                    for value in dict.fromkeys(node.args[1:3]):
                        if (value, times) not in made:
                            made[value, times] = repeated(value, times, node, nodes, taken)
                    node.args = (node.args[0], *(made[v, times] for v in node.args[1:3]), *node.args[3:])
            nodes.append(node)
        graph.nodes = nodes
        return graph

    def times(self, node: Node) -> int:
        """How often each key/value head is repeated. Raises LoweringError where even the query heads do not suffice."""
        heads, shared = node.args[0].shape[-3], node.args[1].shape[-3]
        needed = self.ways * math.gcd(self.others, shared)
        if shared >= needed:
            return 1
        groups = heads // shared
        fitting = [k for k in range(2, groups + 1) if groups % k == 0 and shared * k >= needed]
        if not fitting:
            raise LoweringError(
                node,
                f"attention over {self.ways} ranks by all-to-all needs as many heads as ranks, but the model has {heads}"
                + (f" on {self.others} tensor-parallel ranks" if self.others > 1 else ""),
                "use attention = ring or gather, or usp with a smaller last axis",
                ("context", "attention"),
            )
        return min(fitting, key=lambda k: (shared * k % needed != 0, k))


def repeated(value: Value, times: int, node: Node, nodes: list[Node], taken: set[str]) -> Value:
    """[..., h, s, d] → [..., h times, s, d], each head repeated in place."""
    *front, heads, length, width = value.shape
    steps = [
        ("aten.view.default", (*front, heads, 1, length, width)),
        ("aten.expand.default", (*front, heads, times, length, width)),
        ("aten.view.default", (*front, heads * times, length, width)),
    ]
    for op, shape in steps:
        base = f"{value.name.split('.')[0]}.heads"
        name, k = base, 1
        while name in taken:
            name, k = f"{base}_{k}", k + 1
        taken.add(name)
        made = Node(op, (value, shape), {}, [], node.origin)
        value = Value(name, value.dtype, shape, "", value.differentiable, producer=made)
        made.outputs = [value]
        nodes.append(made)
    return value
