"""The program: everything that a compiled plan says, as it is stored in a program folder.

    program.yaml        this module's `Program`
    instructions/0.txt  the instruction stream of each pipeline stage
    segments/*.py       generated code, one file for each distinct segment
    constants.safetensors  tensors that the model holds besides parameters and buffers, if any

References to tensors are strings: "batch:tokens", "param:embed.weight", "buffer:cos", "const:mask", "once:count" (made
by the prologue), or a slot, "layers.3/x", made by a call for each micro-batch.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from runtime.cuts import parse_cuts
from runtime.errors import ProgramError
from runtime.instructions import Instruction, format_stream, parse_stream
from runtime.loss_scale import LossScaling
from runtime.mesh import axis_of

VERSION = 1


@dataclass(frozen=True)
class Input:
    """A batch input. `shape` is global; dimension `batch_dim` holds the rows (None: the same on all ranks).

    `cuts` say which part of its other dimensions a rank holds. Of an integer input: values lie in [0, below), as far as the model's own use of them tells, and `ignore` marks
    labels that do not count.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    batch_dim: int | None = 0
    below: int | None = None
    ignore: int | None = None
    cuts: str = ""


@dataclass(frozen=True)
class Parameter:
    """A parameter by its logical name. `cuts` say which part a rank holds; `trained`: the optimizer updates it.
    `stages`: the pipeline stages that hold it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    cuts: str = ""
    stages: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Buffer:
    """A buffer. `update`: the slot with its new contents at the end of a step, on pipeline stage `stage`; `average`: the
    axes (and "micro") over which parts with statistics of their own are averaged (`local_statistics`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool = True
    update: str | None = None
    average: tuple[str, ...] = ()
    stage: int = 0


@dataclass(frozen=True)
class Output:
    """A scalar that the step reports: the sum (or maximum) of a slot over micro-batches and over `axes`. Pipeline stage
    `stage` makes it."""

    name: str
    slot: str
    axes: tuple[str, ...] = ()
    op: str = "sum"
    stage: int = 0


@dataclass(frozen=True)
class Result:
    """A tensor that a forward-only program returns: of global `shape`, of which each rank and micro-batch has the part
    that `cuts` say, in `slot`; with an `op` ("sum", "max", "min") those of micro-batches are terms. Dimension
    `batch_dim` holds the rows, if any does. Pipeline stage `stage` makes it."""

    name: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    cuts: str = ""
    batch_dim: int | None = None
    op: str = ""
    stage: int = 0


@dataclass(frozen=True)
class Call:
    """One use of a kind's code. `arguments` and `results` are references in the order of the code's own; `gradients`
    are the references of the arguments that get a gradient. `site` is the first random site of this call. `stages` are the
    pipeline stages that run it: several for what each of them computes for itself."""

    name: str
    kind: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    gradients: tuple[str, ...] = ()
    site: int = 0
    stages: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Message:
    """A slot, or the gradient of one ("d:layers.3/x"), that pipeline stages send each other: one rank's part of it.

    `over`: axes over which it is the same on all ranks, so that each sends its slice, and the slices are gathered where
    they arrive (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 4.1).
    """

    slot: str
    dtype: str
    shape: tuple[int, ...]
    over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bucket:
    """Parameters in one flat buffer, whose gradients are reduced together over `axes`. The first `decayed` of
    `parameters` have weight decay. Pipeline stages `stages` have a copy each.

    ZeRO cuts the flat buffer, padded to a multiple, over the axes `shard`: with `zero` = 1 the optimizer's state, with 2
    the gradients too, with 3 also the parameters. `dtype` is what the code reads, `reduce` that of the gradients and
    `master` that of the parameters that the optimizer updates; both are `dtype` if empty. A bucket that is not `trained`
    has parameters alone. `offload`: what of the own part lives in the host's memory: "optimizer" (its state, and the
    step is taken there), "params", "all" or "none".
    """

    name: str
    dtype: str
    axes: tuple[str, ...]
    parameters: tuple[str, ...]
    decayed: int
    numel: int
    shard: tuple[str, ...] = ()
    zero: int = 0
    reduce: str = ""
    master: str = ""
    trained: bool = True
    stages: tuple[int, ...] = (0,)
    offload: str = "none"

    @property
    def across(self) -> tuple[str, ...]:
        """The axes over which a rank's own part of the gradient is still to be summed when ZeRO has cut it."""
        return tuple(axis for axis in self.axes if axis not in self.shard) if self.shard else ()


@dataclass(frozen=True)
class Program:
    """A compiled plan.

    `mesh`: an axis of the plan that is split into sub-axes appears as these, `tp.0` and `tp.1`. `groups`: the sets of
    axes over which segments communicate.
    """

    name: str
    mesh: dict[str, int]
    microbatches: int
    batch: int
    rows: int
    ragged: bool
    full_batches: bool
    batch_axes: tuple[str, ...]
    model: dict[str, Any]
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    ties: dict[str, str]
    buffers: tuple[Buffer, ...]
    constants: tuple[str, ...]
    outputs: tuple[Output, ...]
    kinds: dict[str, str]
    prologue: Call | None
    calls: tuple[Call, ...]
    buckets: tuple[Bucket, ...]
    optimizer: dict[str, Any] | None
    clip: dict[str, float] | None
    train: dict[str, Any]
    opaque: tuple[str, ...] = ()
    loss_scale: LossScaling | None = None
    widen: bool = False
    mode: str = "train"
    results: tuple[Result, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    pipeline: str = ""
    messages: tuple[Message, ...] = ()
    version: int = VERSION
    folder: Path | None = field(default=None, compare=False)
    streams: tuple[tuple[Instruction, ...], ...] = field(default=(), compare=False)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh as the plan says it, with its axes whole."""
        sizes: dict[str, int] = {}
        for name, size in self.mesh.items():
            sizes[axis_of(name)] = sizes.get(axis_of(name), 1) * size
        return sizes

    @property
    def world(self) -> int:
        size = 1
        for ways in self.mesh.values():
            size *= ways
        return size

    @property
    def stages(self) -> int:
        """Pipeline stages, each with a stream of its own: the size of the mesh axis `pipeline`."""
        return self.mesh.get(self.pipeline, 1)

    @cached_property
    def kept_dtypes(self) -> dict[str, str]:
        """The dtype of each parameter as the optimizer updates it and checkpoints keep it: its master's, if it has one."""
        masters = {name: bucket.master for bucket in self.buckets for name in bucket.parameters}
        return {spec.name: masters.get(spec.name) or spec.dtype for spec in self.parameters}

    @cached_property
    def norm_axes(self) -> dict[str, tuple[str, ...]]:
        """For each trained parameter the axes whose ranks hold different parts of its reduced gradient."""
        cuts = {p.name: parse_cuts(p.cuts) for p in self.parameters}
        found = {}
        for bucket in self.buckets:
            for name in bucket.parameters if bucket.trained else ():
                axes = {*bucket.shard, *(axis for cut in cuts[name] for axis in cut.axes), self.pipeline}
                found[name] = tuple(axis for axis in self.mesh if axis in axes)
        return found


def save(program: Program, folder: Path) -> None:
    """Write program.yaml and the instruction streams."""
    folder.mkdir(parents=True, exist_ok=True)
    data = _plain({f.name: getattr(program, f.name) for f in dataclasses.fields(program) if f.compare})
    header = "# A program compiled by planc. Read by `python -m runtime` and `planc`; see docs/program.md.\n"
    (folder / "program.yaml").write_text(header + yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=110))
    (folder / "instructions").mkdir(exist_ok=True)
    for stage, stream in enumerate(program.streams):
        (folder / "instructions" / f"{stage}.txt").write_text(format_stream(stream))


def load(folder: str | Path) -> Program:
    """The program in a folder. Raises ProgramError."""
    folder = Path(folder)
    path = folder / "program.yaml"
    if not path.is_file():
        raise ProgramError(f"{folder} holds no program.yaml; compile one with: planc compile PLAN.plan")
    try:
        data = yaml.load(path.read_text(), Loader=_LOADER)
        if data.get("version") != VERSION:
            raise ProgramError(
                f"{folder} was compiled for program version {data.get('version')}, this runtime reads version "
                f"{VERSION}; compile the plan again"
            )
        program = _typed(Program, data)
        streams = tuple(
            tuple(parse_stream((folder / "instructions" / f"{stage}.txt").read_text()))
            for stage in range(program.stages)
        )
    except (yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError, OSError) as error:
        raise ProgramError(f"{path} is damaged ({error}); compile the plan again") from error
    return dataclasses.replace(program, folder=folder, streams=streams)


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Short lists and leaf mappings on one line each, so that a program reads as a table."""


class _Line(dict):
    """A mapping that is written on one line."""


_Dumper.add_representer(_Line, lambda d, m: d.represent_mapping("tag:yaml.org,2002:map", m.items(), flow_style=True))


def _plain(value: Any) -> Any:
    """Dataclasses and tuples as what YAML has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _Line({f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _typed(kind: Any, value: Any) -> Any:
    """The inverse of `_plain`, led by the type annotations."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [item for item in typing.get_args(kind) if item is not type(None)]
        return None if value is None else _typed(inner[0], value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{key: _typed(hints[key], item) for key, item in value.items()})
    if origin is tuple:
        item_kind = typing.get_args(kind)[0]
        return tuple(_typed(item_kind, item) for item in value)
    return value
