"""A rank's state by logical name: what of each tensor it holds, saving and restoring it, and the whole tensors.

    model.NAME               a parameter
    buffer.NAME              a buffer, persistent or not
    optimizer.STATE.NAME     the optimizer's state of a parameter, such as `exp_avg`

State is cut as its parameter is. Buckets and flat buffers do not show, so plans that differ in them exchange state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.checkpoint import storage
from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.fit import check_fit, match_names
from runtime.checkpoint.folder import RunState, read_state, write_folder
from runtime.checkpoint.pieces import Held, pieces
from runtime.cuts import parse_cuts
from runtime.transport import together

if TYPE_CHECKING:
    from runtime.session import Session


def save(session: Session, path: Path, data_state: Mapping[str, Any] | None) -> None:
    """Write a checkpoint; see `Session.save`."""
    program = session.program
    plan = program.folder / "plan.plan" if program.folder is not None else None
    state = RunState(
        step=session.steps,
        optimizer_step=max((optimizer.step_count for optimizer in session.optimizers.values()), default=0),
        seed=session.context.seed,
        name=program.name,
        mesh=program.axes,
        plan=plan.read_text() if plan is not None and plan.exists() else None,
        data=dict(data_state) if data_state is not None else None,
        ties=dict(program.ties),
        transient=[buffer.name for buffer in program.buffers if not buffer.persistent],
    )
    write_folder(path, session.transport, held_tensors(session), state)


def restore(session: Session, path: Path) -> dict[str, Any] | None:
    """Read a checkpoint; see `Session.restore`."""
    tensors = held_tensors(session)
    with together(session.transport, CheckpointError, f"cannot restore {path}"):
        state = read_state(path)
        metadata = storage.index_of(path)
        check_fit("the checkpoint", storage.stored_tensors(metadata), tensors)
    # A damaged file is found while reading, when part of the state is replaced already: the error says so.
    with together(session.transport, CheckpointError, f"{path} was restored in part only; do not go on from here"):
        storage.read(path, metadata, tensors)
    for optimizer in session.optimizers.values():
        optimizer.set_step(state.optimizer_step)
    session.context.step, session.context.seed = state.step, state.seed
    return state.data


def held_tensors(session: Session) -> dict[str, Held]:
    """Everything a checkpoint holds of this rank, in the same order on all ranks; pieces are views of the live state.

    Of several replicas the one with the least to write so far saves a tensor, so that all of them share the work.
    """
    mesh, rank, context = session.mesh, session.transport.rank, session.context
    loads: dict[tuple[str, ...], list[int]] = {}
    places: dict[tuple[str, ...], int] = {}
    found: dict[str, Held] = {}
    for name, local, shape, text in _locals(session):
        cuts = parse_cuts(text)
        cut_axes = {axis for cut in cuts for axis in cut.axes}
        replicas = tuple(axis for axis in mesh.names if axis not in cut_axes)
        if replicas not in loads:
            group = mesh.group(rank, replicas)
            loads[replicas], places[replicas] = [0] * len(group), group.index(rank)
        load = loads[replicas]
        writer = load.index(min(load))
        load[writer] += local.numel() * local.element_size()
        parts = pieces(local, shape, cuts, context.sizes, context.coords)
        found[name] = Held(shape, local.dtype, parts, writer == places[replicas])
    return found


def _locals(session: Session) -> Iterator[tuple[str, Tensor, tuple[int, ...], str]]:
    """(name, this rank's part, logical shape, cuts) of every tensor of the state."""
    specs = {spec.name: spec for spec in session.program.parameters}
    for name, tensor in session.state.parameters.items():
        yield f"model.{name}", tensor, tuple(specs[name].shape), specs[name].cuts
    for buffer in session.program.buffers:
        yield f"buffer.{buffer.name}", session.state.buffers[buffer.name], tuple(buffer.shape), ""
    for bucket in session.program.buckets:
        if bucket.name not in session.optimizers:
            continue
        states = session.optimizers[bucket.name].state_tensors()
        groups = {decayed: (name, start) for name, start, _, decayed in session.state.decay_ranges(bucket)}
        end = 0
        for place, name in enumerate(bucket.parameters):
            local = session.state.parameters[name]
            start, end = end, end + local.numel()
            if start == end:
                continue  # a parameter without elements has no state
            group, first = groups[place < bucket.decayed]
            for state, flat in states[group].items():
                view = flat[start - first : end - first].view(local.shape)
                yield f"optimizer.{state}.{name}", view, tuple(specs[name].shape), specs[name].cuts


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
    for spec in program.parameters:
        local, axes = session.state.parameters[spec.name], cut_axes[spec.name]
        whole = local.detach().cpu().clone() if not axes else torch.empty(spec.shape, dtype=local.dtype)
        if axes:
            group = mesh.group(session.transport.rank, axes)
            parts = local.new_empty((len(group), *local.shape))
            session.transport.all_gather(parts, local.contiguous(), group, label=f"gather {spec.name}")
            for member, part in zip(group, parts.cpu(), strict=True):
                coords = context.coords | mesh.coords(member)
                for piece in pieces(part, spec.shape, parse_cuts(spec.cuts), context.sizes, coords):
                    _box(whole, piece.offsets, piece.sizes).copy_(piece.tensor)
        for name in (spec.name, *aliases.get(spec.name, ())):
            yield name, whole
    for buffer in program.buffers:
        if buffer.persistent:
            yield buffer.name, session.state.buffers[buffer.name].cpu().clone()


def _axes(session: Session, cuts: str) -> tuple[str, ...]:
    """The mesh axes of cuts, in the order of the mesh."""
    used = {axis for cut in parse_cuts(cuts) for axis in cut.axes}
    return tuple(axis for axis in session.mesh.names if axis in used)


def _box(tensor: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def load_whole(session: Session, state: Mapping[str, Tensor]) -> None:
    """Take this rank's parts of whole tensors; see `Session.load_state_dict`."""
    names = match_names(session.program, state)
    kept = {name: tensor for name, tensor in session.state.buffers.items() if name not in names}
    session.state.fill({name: state[given] for name, given in names.items()} | kept)
