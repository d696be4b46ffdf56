"""Tensors that a program returns, put together from the parts of ranks and micro-batches, on all pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.cuts import parse_cuts, positions
from runtime.mesh import TIME
from runtime.program import Result
from runtime.split_attention import members_coords

if TYPE_CHECKING:
    from runtime.context import RankContext


def reduced(terms: Sequence[Tensor], op: str) -> Tensor:
    """What micro-batches contribute each a term to."""
    stacked = torch.stack(list(terms))
    return stacked.sum(0) if op == "sum" else stacked.amax(0) if op == "max" else stacked.amin(0)


def empty_parts(context: RankContext, spec: Result, times: int) -> Tensor:
    """Room for what the rank at the same place of another stage has: [times, *local shape]."""
    cuts = parse_cuts(spec.cuts)
    shape = [
        len(positions([cut for cut in cuts if cut.dim == dim], size, context.sizes, context.coords))
        for dim, size in enumerate(spec.shape)
    ]
    return torch.empty(times, *shape, dtype=getattr(torch, spec.dtype), device=context.device)


def whole_result(context: RankContext, spec: Result, parts: Sequence[Tensor], rows: int, batch: int) -> Tensor:
    """The tensor in its original order, on every rank: collective over the axes that cut it, and the pipeline. `parts` are
    this rank's, one for each micro-batch (none if another stage makes them); of a dimension of `batch` rows the first
    `rows` are real."""
    cuts = parse_cuts(spec.cuts)
    used = {axis for cut in cuts for axis in cut.axes}
    axes = tuple(axis for axis in context.mesh.names if axis in used)
    if spec.op and parts:
        parts = [reduced(parts, spec.op)]
    times = context.sizes[TIME] if TIME in used else 1
    mine = torch.stack(list(parts[-times:])) if parts else empty_parts(context, spec, times)
    if context.pipeline:
        source = context.peer(context.pipeline, spec.stage)
        context.transport.broadcast(mine, context.group((context.pipeline,)), source, label=f"result {spec.name}")
    group = context.group(axes) if axes else (context.transport.rank,)
    every = mine.new_empty((len(group), *mine.shape))
    context.transport.all_gather(every, mine.contiguous(), group, label=f"result {spec.name}")
    whole = mine.new_zeros(spec.shape)
    for member in range(len(group)):
        at: Mapping[str, int] = members_coords(axes, member, context.sizes, context.coords)
        for micro in range(times):
            part, index = every[member, micro], []
            for dim, size in enumerate(spec.shape):
                own = [cut for cut in cuts if cut.dim == dim]
                where = positions(own, size, context.sizes, {**at, TIME: micro}, part.device, mark_padding=True)
                part = part.index_select(dim, (where >= 0).nonzero().flatten())
                index.append(where[where >= 0])
            if index:
                whole[torch.meshgrid(*index, indexing="ij")] = part
            else:
                whole = part
    if spec.batch_dim is not None and spec.shape[spec.batch_dim] == batch:
        whole = whole.narrow(spec.batch_dim, 0, rows)
    return whole
