"""lift_vary: the reduction of a parameter's gradient leaves the segments and becomes an instruction."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.graph import Graph, Value, map_values
from compiler.layout.placement import V


@dataclass(frozen=True)
class LiftVary:
    """Where every use of a parameter goes through `vary` on an axis, the parameter itself becomes `V` there.

    Its gradient then is a partial sum that accumulates over uses and micro-batches and is reduced once, in a bucket.

    before:  input %w : float32[64] {}              after:  input %w : float32[64] {tp: V}
             %w.1 : float32[64] {tp: V} = planc.vary(%w, 'tp')      (gone)
    """

    name: str = "lift_vary"
    requires: frozenset[str] = frozenset({"layouts"})
    provides: frozenset[str] = frozenset({"vary_lifted"})

    def __call__(self, graph: Graph) -> Graph:
        users = graph.users()
        replaced: dict[Value, Value] = {}
        for value in graph.inputs:
            if value.kind != "param":
                continue
            while (uses := users.get(value)) and all(
                node.op == "planc.vary" and node.args[1] == uses[0].args[1] for node in uses
            ):
                assert value.layout is not None
                value.layout = value.layout.with_(uses[0].args[1], V)
                for node in uses:
                    out = node.outputs[0]
                    assert out is not None
                    replaced[out] = value
                    users[value] = [*users.get(value, []), *users.get(out, [])]
                users[value] = [node for node in users[value] if node not in uses]
        if replaced:
            graph.nodes = [node for node in graph.nodes if not (node.outputs[0] in replaced)]
            for node in graph.nodes:
                node.args, node.kwargs = map_values((node.args, node.kwargs), lambda v: replaced.get(v, v))
        return graph
