"""Reading at positions of a dimension that is cut: each rank reads what it has, and adds nothing for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compiler.autodiff.local import held_cut_text, shape_of
from compiler.autodiff.operators import forward
from compiler.ir.graph import Node, Value
from compiler.layout.placement import Shard

if TYPE_CHECKING:
    from compiler.autodiff.trace import Tracer


def own_positions(tracer: Tracer, value: Value, dim: int, index: Value) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(position in this rank's part of `value` along `dim`, or 0; whether another rank has it [..., 1]), or None where
    every rank has all of it."""
    axes = tuple(a for a in tracer.mesh.names if isinstance(p := value.layout[a], Shard) and p.dim == dim)
    if not axes:
        return None
    local = shape_of(index, tracer.mesh)
    results = (tracer.recorder.empty(local, index.dtype), tracer.recorder.empty((*local, 1), "bool"))
    return tracer.recorder.add("planc.own_rows", (tracer.value(index), held_cut_text(value, axes, tracer.mesh)), results)


@forward("aten.embedding.default")
def embedding(tracer: Tracer, node: Node) -> Any:
    """Of a table that is cut by rows: tokens of other ranks look up row 0 and get zeros."""
    table, tokens = node.args[:2]
    own = own_positions(tracer, table, 0, tokens)
    if own is None:
        return tracer.call(node)
    rows, others = own
    found = torch.nn.functional.embedding(rows, tracer.tensor(table))
    padding = node.args[2] if len(node.args) > 2 else -1
    if padding >= 0:
        # The padding row is read, but gets no gradient.
        is_padding = (tracer.tensor(tokens) == padding).unsqueeze(-1)
        found = torch.where(is_padding, found.detach(), found)
    return found.masked_fill(others, 0.0)


@forward("aten.gather.default")
def gather(tracer: Tracer, node: Node) -> Any:
    value, dim, index = node.args[:3]
    own = own_positions(tracer, value, dim % max(len(value.shape), 1), index)
    if own is None:
        return tracer.call(node)
    positions, others = own
    return tracer.tensor(value).gather(dim, positions).masked_fill(others.squeeze(-1), 0)
