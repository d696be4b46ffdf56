"""A session: one rank's running program, for people with a training loop of their own.

    session = runtime.load("build/quickstart")        # under torchrun: this process's rank
    result = session.step({"tokens": tokens, "labels": labels})
    print(result.loss)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint import InitialWeights
from runtime.checkpoint import rank as checkpoint
from runtime.checkpoint.whole import load_whole, whole_tensors
from runtime.context import RankContext, on_stages
from runtime.cuts import local_part, parse_cuts
from runtime.executor import Executor, StepResult, load_kinds
from runtime.factory import build
from runtime.initial import initialise
from runtime.loss_scale import LossScale
from runtime.lr import Schedule
from runtime.mesh import Mesh
from runtime.optimizer import FlatOptimizer, OptimizerConfig, ParamGroup
from runtime.program import Input, Program, ProgramError, Result
from runtime.program import load as load_program
from runtime.results import whole_result
from runtime.state import RankState
from runtime.store import Store
from runtime.transport import Transport, connect


class BatchError(ValueError):
    """A batch does not fit the program; the message says which input, what came and what is right."""


class Session:
    """One rank of a program. `state` are full initial tensors by logical name (default: the model's own
    initialisation under the plan's seed). Close it, or use it as a context manager."""

    def __init__(
        self, program: Program, transport: Transport, state: Mapping[str, Tensor] | None = None,
        kinds: Mapping[str, ModuleType] | None = None,
    ):  # fmt: skip
        if transport.size != program.world:
            mesh = " ".join(f"{axis}={size}" for axis, size in program.axes.items())
            raise ProgramError(f"{program.name} needs {program.world} ranks ({mesh}), but {transport.size} are running")
        self.program, self.transport = program, transport
        self.mesh = Mesh(tuple(program.mesh.items()))
        self.coords = self.mesh.coords(transport.rank)
        transport.prepare(used_groups(program, self.mesh))
        seed = int(program.train["seed"])
        self.context = RankContext(self.mesh, transport, program.microbatches, seed, program.rows, program.pipeline)
        self.state = RankState(program, self.context.sizes, self.context.coords, transport.device)
        if state is None:
            initialise(self.state, transport, seed)
        else:
            self.state.fill(state)
        if program.opaque:
            model = build(program.model["factory"], program.model["options"], program.model.get("base"))
            if program.mode == "forward":
                model.eval()
            self.context.opaque_modules = {path: model.get_submodule(path) for path in program.opaque}
        self.optimizers = make_optimizers(program, self.state)
        self.loss_scale = LossScale(program.loss_scale) if program.loss_scale is not None else None
        self.schedule = Schedule.from_options(program.optimizer or {}, int(program.train["steps"] or 0))
        self.executor = Executor(
            program, kinds or load_kinds(program), self.context, self.state, self.optimizers, self.loss_scale
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.transport.close()

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self.context.step

    def step(self, batch: Mapping[str, Tensor], rows: int | None = None, local: bool = False) -> StepResult:
        """One training step.

        `batch` holds the whole batch by input name, the same on every rank, or with `local=True` just this rank's
        rows. `rows` is the number of real rows of the whole batch; with a whole batch it defaults to the rows given,
        and a batch that is too short (the last one of an epoch) is padded, without any effect on the result.
        Raises BatchError if the batch does not fit the program.
        """
        self.check_names(batch)
        if not local:
            given = self.rows_of(batch)
            rows = given if rows is None else rows
            batch = {spec.name: self.local_rows(spec, batch[spec.name]) for spec in self.program.inputs}
        rows = self.program.rows if rows is None else rows
        self.check_rows(rows)
        placed = {spec.name: self.place(spec, batch[spec.name]) for spec in self.program.inputs}
        return self.executor.run(placed, rows, self.schedule(self.steps))

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the model of a forward-only program returns for a whole batch, by name: whole tensors in their original
        order, on every rank. Collective. (`step(batch).tensors` are the parts that this rank has made.)"""
        rows = self.rows_of(batch)
        found = self.step(batch)
        program = self.program
        return {
            spec.name: whole_result(self.context, spec, found.tensors[spec.name], rows, program.batch)
            for spec in program.results
        }

    # -- batches -------------------------------------------------------------------------------------------------

    def check_names(self, batch: Mapping[str, Tensor]) -> None:
        names = [spec.name for spec in self.program.inputs]
        if missing := [name for name in names if name not in batch]:
            raise BatchError(f"the batch has no {', '.join(missing)}; the plan's inputs are {', '.join(names)}")

    def check_rows(self, rows: int) -> None:
        program = self.program
        if not 1 <= rows <= program.rows:
            raise BatchError(f"the batch has {rows} rows; the plan says {program.rows}")
        if rows < program.rows and not program.ragged:
            why = "the model joins the rows of a batch or counts them" if program.full_batches else "the plan says tail = drop"
            raise BatchError(f"the batch has {rows} rows, but only full batches of {program.rows} are possible: {why}")

    def rows_of(self, batch: Mapping[str, Tensor]) -> int:
        """The rows of a whole batch; all inputs must agree."""
        found = {s.name: batch[s.name].shape[s.batch_dim] for s in self.program.inputs if s.batch_dim is not None}
        if len(set(found.values())) > 1:
            raise BatchError(f"the inputs have different numbers of rows: {found}")
        return next(iter(found.values()), self.program.rows)

    def row_range(self) -> tuple[int, int]:
        """The rows [start, end) of the whole batch, padding included, that this rank computes."""
        ways, index = 1, 0
        for axis in self.program.batch_axes:
            ways, index = ways * self.program.mesh[axis], index * self.program.mesh[axis] + self.coords[axis]
        rows = self.program.batch // ways
        return index * rows, (index + 1) * rows

    def local_rows(self, spec: Input, tensor: Tensor) -> Tensor:
        """This rank's rows; beyond the end of a short batch its last row is repeated."""
        if spec.batch_dim is None:
            return tensor
        start, end = self.row_range()
        index = torch.arange(start, end, device=tensor.device).clamp_(max=tensor.shape[spec.batch_dim] - 1)
        return tensor.index_select(spec.batch_dim, index)

    def place(self, spec: Input, tensor: Tensor) -> Tensor:
        """This rank's part of its rows, on its device, in the program's dtype, with the shape checked."""
        shape = list(spec.shape)
        if spec.batch_dim is not None:
            start, end = self.row_range()
            shape[spec.batch_dim] = end - start
        if list(tensor.shape) != shape:
            raise BatchError(f"input {spec.name}: shape {list(tensor.shape)}, but this rank needs {shape}")
        wanted = getattr(torch, spec.dtype)
        if tensor.dtype != wanted:
            if tensor.is_floating_point() != wanted.is_floating_point:
                raise BatchError(f"input {spec.name}: dtype {tensor.dtype}, but the plan says {spec.dtype}")
            tensor = tensor.to(wanted)
        part = local_part(tensor, parse_cuts(spec.cuts), self.context.sizes, self.context.coords)
        return part.to(self.transport.device, non_blocking=True)

    # -- state ---------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Tensor]:
        """This pipeline stage's parameters by logical name, in the parts that the layouts give this rank: views, or with
        ZeRO copies, gathered from their shards. Collective."""
        return self._whole(lambda store: store.truth) | self.state.alone

    def gradients(self) -> dict[str, Tensor]:
        """The last step's reduced gradients by parameter name (clipped, if the plan clips), in the same parts.
        Collective."""
        return self._whole(lambda store: store.reduced)

    def _whole(self, part: Callable[[Store], Tensor | None]) -> dict[str, Tensor]:
        """The tensors whose own part a store has as `part`."""
        found = {}
        for store in self.state.stores.values():
            if (own := part(store)) is not None:
                flat = self.gathered(store, own)
                found.update((name, flat[span.start : span.end].view(span.shape)) for name, span in store.spans.items())
        return found

    def gathered(self, store: Store, own: Tensor) -> Tensor:
        """The whole of what `own` is this rank's part of: itself, or with ZeRO a copy. Collective."""
        if not store.bucket.shard:
            return own
        own = own.to(self.transport.device)
        whole = own.new_empty(store.padded)
        group = self.context.group(store.bucket.shard)
        self.transport.all_gather(whole, own.contiguous(), group, label=f"gather {store.bucket.name}")
        return whole

    def state_dict(self) -> dict[str, Tensor]:
        """Whole parameters and persistent buffers by the model's own names, tied ones under each of theirs: copies on
        the CPU, for `model.load_state_dict`. Collective; the whole model must fit into every rank's memory."""
        return dict(whole_tensors(self))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse: take this rank's parts. Not collective; the optimizer's state stays as it is.

        Raises CheckpointError if tensors are missing, extra or of another shape.
        """
        load_whole(self, state)

    def save(self, path: str | Path, data_state: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint: parameters, buffers, optimizer state, step count, and `data_state`, a small JSON-able
        mapping that says where in the data the run stands. Collective.

        The folder `path` appears when everything is written; one that was there is replaced. All ranks must see the
        folder. Raises CheckpointError, on all ranks.
        """
        checkpoint.save(self, Path(path), data_state)

    def restore(self, path: str | Path) -> dict[str, Any] | None:
        """Go on from a checkpoint that this or another plan of the model wrote; the `data_state` given to `save`.
        Collective. Seed and step count are the checkpoint's too, so that dropout goes on as it would have.

        Raises CheckpointError, on all ranks: before anything is changed if it does not fit, or cannot be read at all.
        """
        return checkpoint.restore(self, Path(path))


def make_optimizers(program: Program, state: RankState) -> dict[str, FlatOptimizer]:
    """One flat optimizer for each trained bucket, with the decayed and the undecayed part as its groups."""
    options = program.optimizer
    if options is None:
        return {}
    config = OptimizerConfig.from_options(options)
    found = {}
    for name, store in state.stores.items():
        if not store.bucket.trained:
            continue
        groups = []
        for group, start, end, decayed in store.decays():
            master = None if store.master is None else store.master[start:end]
            decay = config.weight_decay if decayed else 0.0
            param = store.host if store.host is not None else store.shard
            assert param is not None
            groups.append(ParamGroup(group, param[start:end], decay, master=master))
        found[name] = FlatOptimizer(config, groups)
    return found


def result_axes(result: Result) -> set[str]:
    """The axes that cut a result."""
    return {axis for cut in parse_cuts(result.cuts) for axis in cut.axes}


def used_groups(program: Program, mesh: Mesh) -> list[tuple[int, ...]]:
    """Every group that the program may communicate in, the same list on all ranks."""
    sets = {tuple(n for n in mesh.names if n in result_axes(result)) for result in program.results}
    sets |= {output.axes for output in program.outputs} | set(program.norm_axes.values()) | set(program.groups)
    sets |= {(axis,) for axis in mesh.names} | {program.batch_axes}
    sets |= {mesh.names} if program.loss_scale is not None else set()
    sets |= {tuple(a for a in buffer.average if a in mesh.names) for buffer in program.buffers}
    wanted = {(axes, ()) for axes in sets}
    wanted |= {(axes, b.stages) for b in program.buckets for axes in (b.axes, b.shard, b.across)}
    groups: dict[tuple[int, ...], None] = {}
    for axes, stages in sorted(wanted):
        found = (on_stages(mesh, members, axes, program.pipeline, stages) for members in mesh.groups(axes))
        groups |= dict.fromkeys(group for group in found if len(group) > 1)
    return list(groups)


def load(
    folder: str | Path, transport: Transport | None = None, weights: str | Path | None = None
) -> Session:  # fmt: skip
    """The session of this process's rank: under torchrun with gloo or NCCL, else alone.

    `weights`: a safetensors file or folder to begin with, instead of the model's own initialisation.
    Raises ProgramError if the folder holds no program for this runtime, or one for another number of ranks, and
    CheckpointError if the weights are not those of the model.
    """
    program = load_program(folder)
    state = InitialWeights(program, weights) if weights is not None else None
    return Session(program, transport or connect(), state)
