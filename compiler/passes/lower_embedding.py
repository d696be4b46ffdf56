"""lower_embedding: what an embedding table asks of its gradient must be possible in a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.ir.graph import Graph, Node, Value
from compiler.layout.rules.signature import arguments
from compiler.passes.lower_support import Emitter, LoweringError, replace_calls


@dataclass(frozen=True)
class LowerEmbedding:
    """Drop the options of `embedding` that concern training it, or refuse those that change what is learnt.

    `sparse` gradients have no layout. `scale_grad_by_freq` divides by how often the whole batch uses a row, which no
    part of the batch knows. `max_norm` arrives as an operator that renormalises the table in place.

    before:  %x : float32[8, 16] = aten.embedding.default(%table, %tokens, 0, False, False)
    after:   %x : float32[8, 16] = aten.embedding.default(%table, %tokens, 0)
    """

    name: str = "lower_embedding"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"embeddings_lowered"})

    def __call__(self, graph: Graph) -> Graph:
        return replace_calls(graph, _lower)


def _lower(node: Node, emit: Emitter) -> Sequence[Value] | None:
    if node.op.startswith("aten.embedding_renorm"):
        raise LoweringError(
            node, "an embedding with max_norm changes its table in the forward", "leave max_norm out of the embedding"
        )
    if node.op != "aten.embedding.default":
        return None
    given = arguments(node)
    if given["sparse"]:
        raise LoweringError(node, "an embedding with sparse gradients", "make it with sparse=False")
    if given["scale_grad_by_freq"]:
        raise LoweringError(
            node,
            "an embedding whose gradient is scaled by the frequencies in the batch",
            "make it with scale_grad_by_freq=False",
        )
    return [emit("aten.embedding.default", given["weight"], given["indices"], given["padding_idx"])]
