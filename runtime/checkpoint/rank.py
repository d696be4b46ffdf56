"""A rank's state by logical name: what of each tensor it holds, saving and restoring it.

    model.NAME               a parameter
    buffer.NAME              a buffer, persistent or not
    optimizer.STATE.NAME     the optimizer's state of a parameter, such as `exp_avg`

State is cut as its parameter is. Buckets and flat buffers do not show, so plans that differ in them exchange state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.checkpoint import storage
from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.fit import check_fit
from runtime.checkpoint.folder import RunState, read_state, write_folder
from runtime.checkpoint.pieces import Box, Held, boxes, pieces
from runtime.context import stage_group
from runtime.cuts import parse_cuts
from runtime.optimizer import OptimizerConfig
from runtime.store import Store
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
        loss_scale=session.loss_scale.state() if session.loss_scale is not None else None,
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
    for store in session.state.stores.values():
        store.round()
    for optimizer in session.optimizers.values():
        optimizer.set_step(state.optimizer_step)
    if session.loss_scale is not None and state.loss_scale is not None:
        session.loss_scale.load(state.loss_scale)
    session.context.step, session.context.seed = state.step, state.seed
    return state.data


def held_tensors(session: Session) -> dict[str, Held]:
    """Everything a checkpoint holds of this rank, in the same order on all ranks; pieces are views of the live state.

    Of several replicas the one with the least to write so far saves a tensor, so that all of them share the work.
    """
    mesh, rank, context = session.mesh, session.transport.rank, session.context
    loads: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = {}
    places: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
    found: dict[str, Held] = {}
    for part in _locals(session):
        cuts = parse_cuts(part.cuts)
        cut_axes = {axis for cut in cuts for axis in cut.axes} | set(part.shard)
        replicas = tuple(axis for axis in mesh.names if axis not in cut_axes)
        if (replicas, part.stages) not in loads:
            group = stage_group(mesh, rank, replicas, session.program.pipeline, part.stages)
            loads[replicas, part.stages] = [0] * len(group)
            places[replicas, part.stages] = group.index(rank) if rank in group else -1
        load = loads[replicas, part.stages]
        writer = load.index(min(load))
        load[writer] += math.prod(part.shape) * part.dtype.itemsize
        held = pieces(part.boxes, part.shape, cuts, context.sizes, context.coords)
        found[part.name] = Held(part.shape, part.dtype, held, writer == places[replicas, part.stages])
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the state: its logical shape, the cuts that layouts make, the axes over which ZeRO cuts what is left,
    the pipeline stages that have it, and what of it is here (nothing on other stages)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: str
    shard: tuple[str, ...]
    stages: tuple[int, ...]
    boxes: list[Box]


def _locals(session: Session) -> Iterator[_Part]:
    """Every tensor of the state, in the same order on all ranks."""
    program, state = session.program, session.state
    specs = {spec.name: spec for spec in program.parameters}
    buckets = {name: bucket for bucket in program.buckets for name in bucket.parameters}
    for spec in program.parameters:
        bucket, store = buckets.get(spec.name), state.home.get(spec.name)
        found: list[Box] = []
        if store is not None:
            found = _boxes(store, [(0, store.truth)], spec.name)
        elif spec.name in state.alone:
            tensor = state.alone[spec.name]
            found = boxes(tensor.view(-1), 0, tensor.shape)
        dtype = getattr(torch, program.kept_dtypes[spec.name])
        shard = bucket.shard if bucket is not None else ()
        yield _Part(f"model.{spec.name}", spec.shape, dtype, spec.cuts, shard, spec.stages, found)
    for buffer in program.buffers:
        tensor = state.buffers[buffer.name]
        held = boxes(tensor.view(-1), 0, buffer.shape)  # of all stages; the one that changes it saves it
        yield _Part(f"buffer.{buffer.name}", buffer.shape, tensor.dtype, "", (), (buffer.stage,), held)
    for bucket in program.buckets:
        if program.optimizer is None or not bucket.trained:
            continue
        store = state.stores.get(bucket.name)
        for statistic in OptimizerConfig.from_options(program.optimizer).state_names:
            flats: list[tuple[int, Tensor]] = []
            if store is not None:
                states = session.optimizers[bucket.name].state_tensors()
                flats = [(start, states[group][statistic]) for group, start, _, _ in store.decays()]
            for name in bucket.parameters:
                spec, dtype = specs[name], getattr(torch, program.kept_dtypes[name])
                found = _boxes(store, flats, name) if store is not None else []
                if math.prod(spec.shape):  # a parameter without elements has no state
                    label = f"optimizer.{statistic}.{name}"
                    yield _Part(label, spec.shape, dtype, spec.cuts, bucket.shard, bucket.stages, found)


def _boxes(store: Store, flats: Sequence[tuple[int, Tensor]], name: str) -> list[Box]:
    """What of a parameter, or of a statistic of it, lies in this rank's own part of its bucket; `flats` cover that part
    from their starts on."""
    span = store.spans[name]
    start, end = store.inside(span.start, span.end)
    found: list[Box] = []
    for at, flat in flats:
        first, last = max(start, at), min(end, at + flat.numel())
        if last > first:
            found += boxes(flat[first - at : last - at], store.start + first - span.start, span.shape)
    return found
