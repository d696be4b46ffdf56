"""lift_vary: the reduction of a parameter's gradient leaves the segments and becomes an instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.ir.graph import Graph, Node, Value, map_values
from compiler.layout.placement import Layout, V


@dataclass(frozen=True)
class LiftVary:
    """Where every use of a parameter goes through `vary` on an axis, the parameter itself becomes `V` there.

    Its gradient then is a partial sum that accumulates over uses and micro-batches and is reduced once, in a bucket.

    before:  input %w : float32[64] {}              after:  input %w : float32[64] {tp: V}
             %w.1 : float32[64] {tp: V} = planc.vary(%w, ['tp'])      (gone)
    """

    name: str = "lift_vary"
    requires: frozenset[str] = frozenset({"layouts"})
    provides: frozenset[str] = frozenset({"vary_lifted"})

    def __call__(self, graph: Graph) -> Graph:
        users = graph.users()
        replaced: dict[Value, Value] = {}
        for value in graph.inputs:
            while value.kind == "param" and (axes := lifted_axes(users.get(value, ()))):
                assert value.layout is not None
                value.layout = Layout({**value.layout, **dict.fromkeys(axes, V)})
                for node in list(users[value]):
                    rest = tuple(axis for axis in node.args[1] if axis not in axes)
                    if rest:
                        node.args = (value, rest)
                        continue
                    out = node.outputs[0]
                    assert out is not None
                    replaced[out] = value
                    users[value].remove(node)
                    users[value] += users.get(out, [])
        if replaced:
            graph.nodes = [node for node in graph.nodes if not (node.outputs[0] in replaced)]
            for node in graph.nodes:
                node.args, node.kwargs = map_values((node.args, node.kwargs), lambda v: replaced.get(v, v))
        return graph


def lifted_axes(uses: Sequence[Node]) -> tuple[str, ...]:
    """The axes over which every use of a parameter varies it."""
    if not uses or any(node.op != "planc.vary" for node in uses):
        return ()
    return tuple(axis for axis in uses[0].args[1] if all(axis in node.args[1] for node in uses))
