"""detach_outputs: metrics and new buffer contents take no part in differentiation."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.graph import Graph, Node, Value


@dataclass(frozen=True)
class DetachOutputs:
    """Cut the gradient at every output but the loss, and mark what no longer needs one.

    before:  %accuracy : float32[] = aten.div.Tensor(%hits, %n)        # differentiable
             output metric:accuracy = %accuracy
    after:   %accuracy.detached : float32[] = aten.detach.default(%accuracy)
             output metric:accuracy = %accuracy.detached
    """

    name: str = "detach_outputs"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"outputs_detached"})

    def __call__(self, graph: Graph) -> Graph:
        for role, value in list(graph.outputs.items()):
            if role != "loss" and value.differentiable:
                origin = value.producer.origin if value.producer else None
                node = Node("aten.detach.default", (value,), {}, [], *([origin] if origin else []))
                out = Value(f"{value.name}.detached", value.dtype, value.shape, producer=node)
                node.outputs = [out]
                graph.nodes.append(node)
                graph.outputs[role] = out
        return graph
