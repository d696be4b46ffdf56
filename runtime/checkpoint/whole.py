"""Whole tensors by the model's own names, out of a running session and into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.checkpoint.fit import match_names
from runtime.checkpoint.pieces import boxes, pieces
from runtime.cuts import parse_cuts
from runtime.program import Parameter
from runtime.store import Store

if TYPE_CHECKING:
    from runtime.session import Session


def whole_tensors(session: Session) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and persistent buffer by the model's own names, whole, on the CPU; a name that is tied comes with
    the same tensor as the one it is tied to. Collective: every rank takes every tensor, one at a time."""
    program, mesh, context = session.program, session.mesh, session.context
    aliases: dict[str, list[str]] = {}
    for alias, name in program.ties.items():
        aliases.setdefault(name, []).append(alias)
    cut_axes = {spec.name: _axes(session, spec.cuts) for spec in program.parameters}
    groups = [group for axes in sorted(set(cut_axes.values())) for group in mesh.groups(axes) if len(group) > 1]
    session.transport.prepare(list(dict.fromkeys(groups)))
    gathered: dict[Store, Tensor] = {}  # of the last bucket: its parameters mostly follow each other
    for spec in program.parameters:
        local, axes = _local(session, spec, gathered), cut_axes[spec.name]
        whole = local.cpu() if not axes else torch.empty(spec.shape, dtype=local.dtype)
        if axes:
            group = mesh.group(session.transport.rank, axes)
            parts = local.new_empty((len(group), *local.shape))
            session.transport.all_gather(parts, local, group, label=f"gather {spec.name}")
            for member, part in zip(group, parts.cpu(), strict=True):
                coords = context.coords | mesh.coords(member)
                held = boxes(part.view(-1), 0, part.shape)
                for piece in pieces(held, spec.shape, parse_cuts(spec.cuts), context.sizes, coords):
                    _box(whole, piece.offsets, piece.sizes).copy_(piece.tensor)
        for name in (spec.name, *aliases.get(spec.name, ())):
            yield name, whole
    for buffer in program.buffers:
        if buffer.persistent:
            tensor = session.state.buffers[buffer.name].clone()
            _from_stage(session, tensor, buffer.stage, buffer.name)
            yield buffer.name, tensor.cpu()


def load_whole(session: Session, state: Mapping[str, Tensor]) -> None:
    """Take this rank's parts of whole tensors; see `Session.load_state_dict`."""
    names = match_names(session.program, state)
    kept = {name: tensor.clone() for name, tensor in session.state.buffers.items() if name not in names}
    session.state.fill({name: state[given] for name, given in names.items()} | kept)


def _local(session: Session, spec: Parameter, gathered: dict[Store, Tensor]) -> Tensor:
    """A copy of a rank's part of a parameter, from its shards and its pipeline stage. Collective."""
    state = session.state
    if (store := state.home.get(spec.name)) is not None:
        span = store.spans[spec.name]
        if store not in gathered:
            gathered.clear()
            gathered[store] = session.gathered(store, store.truth)
        local = gathered[store][span.start : span.end].view(span.shape).clone()
    elif spec.name in state.alone:
        local = state.alone[spec.name].clone()
    else:
        dtype = getattr(torch, session.program.kept_dtypes[spec.name])
        local = torch.empty(state.local_shape(spec), dtype=dtype, device=state.device)
    _from_stage(session, local, spec.stages[0], spec.name)
    return local


def _from_stage(session: Session, tensor: Tensor, stage: int, name: str) -> None:
    """The tensor of one pipeline stage on all of them. Collective."""
    if session.program.stages > 1:
        axis = session.program.pipeline
        group, source = session.context.group((axis,)), session.context.peer(axis, stage)
        session.transport.broadcast(tensor, group, source, label=f"{name} from stage {stage}")


def _axes(session: Session, cuts: str) -> tuple[str, ...]:
    """The mesh axes of cuts, in the order of the mesh."""
    used = {axis for cut in parse_cuts(cuts) for axis in cut.axes}
    return tuple(axis for axis in session.mesh.names if axis in used)


def _box(tensor: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
