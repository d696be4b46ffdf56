"""The plan: what a `.plan` file means, checked and complete.

Everything after the front end reads these classes and nothing else of the language. A field made
with `option` is an option of the statement with the same name in the plan: its kind, its default
and its one-line explanation here drive the checking, the messages and docs/language.md. A field
made with `patterns` collects the strings behind a word (`column "a", "b"`).

`span` is where a thing was written and `given` which options the plan spelled out, and where
(an option that is absent from `given` has its default). Both are left out of comparisons, so two
plans are equal when they mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from compiler.diagnostics import Diagnostic, Span
from compiler.dsl.devices import Device, known_devices
from compiler.dsl.dtypes import DTYPE
from compiler.dsl.kinds import (
    Choice,
    Maybe,
    OneOf,
    Rate,
    Real,
    Several,
    Size,
    Speed,
    Switch,
    Text,
    Whole,
)
from compiler.dsl.linkkind import LinkKind
from compiler.dsl.options import option, patterns
from compiler.dsl.strings import Link, wrong_data, wrong_path, wrong_schedule

NOWHERE = Span("", 0, 0, 0, 0)
_MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Base: where it was written, and which options were written."""

    span: Span = field(default=NOWHERE, compare=False)
    given: Mapping[str, Span] = field(default_factory=dict, compare=False, repr=False)


# --- the model and its data --------------------------------------------------------------


@dataclass(frozen=True)
class Pattern:
    """A pattern of module names: `layers.*.attn.w[qkv]`."""

    text: str
    span: Span = field(default=NOWHERE, compare=False)

    def matches(self, name: str) -> bool:
        """Is `name`, the dotted name of a module or parameter, one of those meant?"""
        return fnmatchcase(name, self.text)

    def covers(self, name: str) -> bool:
        """Is `name`, or a module that holds it, one of those meant?"""
        parts = name.split(".")
        return any(self.matches(".".join(parts[:k])) for k in range(1, len(parts) + 1))


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    """`model "module.path:Qual.name" { option = value }`."""

    factory: str
    options: Mapping[str, object] = field(default_factory=dict)
    factory_span: Span = field(default=NOWHERE, compare=False)

    @property
    def option_spans(self) -> Mapping[str, Span]:
        """Where each option was written."""
        return self.given

    @property
    def folder(self) -> Path:
        """The folder that a factory `path/to/file.py:Name` is relative to."""
        return Path(self.factory_span.file).parent


@dataclass(frozen=True, kw_only=True)
class LossSpec(ModelSpec):
    """`loss "module:function" { option = value }`: called with the model's output and the batch."""


@dataclass(frozen=True, kw_only=True)
class InputSpec(Spec):
    """`input tokens : int64[batch, seq]`. `dim_names` has the name a size was written as."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim_names: tuple[str | None, ...]
    batch_dim: int | None = 0


@dataclass(frozen=True, kw_only=True)
class MeshAxis(Spec):
    """One axis of `mesh pp=2 dp=4`; the last axis is the innermost (neighbouring ranks)."""

    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class ClusterSpec(Spec):
    """`cluster { … }`: the machines that the plan is for."""

    nodes: int = option(Whole(1), 1, "number of machines")
    devices: int | None = option(
        Maybe(Whole(1)), None, "devices in each machine; by default what the mesh needs"
    )
    device: str = option(
        Choice(*known_devices(), noun="a known device"), "cpu", "the device; see the table below"
    )
    intra: Link | None = option(
        Maybe(LinkKind()), None, "the link inside a machine, as bandwidth per device"
    )
    inter: Link | None = option(
        Maybe(LinkKind()), None, "the link between machines, as bandwidth per device"
    )
    memory: int | None = option(
        Maybe(Size()), None, "memory of a device, instead of the data sheet's"
    )
    bandwidth: float | None = option(
        Maybe(Rate()), None, "memory bandwidth of a device, instead of the data sheet's"
    )
    flops: float | None = option(
        Maybe(Speed()), None, "peak speed of a device in every dtype, instead of the data sheet's"
    )

    @property
    def hardware(self) -> Device:
        """The device's data sheet, with what the plan says instead."""
        sheet = known_devices()[self.device]
        flops = sheet.flops if self.flops is None else dict.fromkeys(sheet.flops, self.flops)
        return Device(
            sheet.name, self.memory or sheet.memory, self.bandwidth or sheet.bandwidth, flops
        )


# --- strategies --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Strategy(Spec):
    """Base of the statements `… over AXIS`."""

    axes: tuple[str, ...]
    axes_span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class DataStrategy(Strategy):
    """`data over dp`: each rank takes its part of the batch."""

    microbatches: int | None = option(
        Maybe(Whole(1, 1_000_000)),
        None,
        "parts of a rank's batch that run one after the other, gradients accumulated",
    )
    bucket: int = option(Size(), 25 * _MB, "gradients that are reduced as one")
    tail: str = option(
        Choice("pad", "drop"),
        "pad",
        "a last batch that is too small: padded and masked, or left out",
    )


@dataclass(frozen=True, kw_only=True)
class ZeroStrategy(Strategy):
    """`zero over dp`: optimizer state (1), gradients (2) and parameters (3) are sharded."""

    stage: int = option(Whole(1, 3), 1, "1 optimizer state, 2 and gradients, 3 and parameters")
    bucket: int = option(Size(), 25 * _MB, "parameters that are gathered and reduced as one")
    prefetch: int = option(Whole(0, 10_000), 1, "buckets gathered ahead of their use (stage 3; else all at once)")
    persist_below: int = option(
        Whole(0), 0, "parameters with fewer elements than this stay whole on every rank"
    )
    offload: str = option(
        Choice("none", "optimizer", "params", "all"), "none", "what lives in the host's memory"
    )
    hybrid: int | None = option(
        Maybe(Whole(1)), None, "shard within groups of this many ranks and replicate across them"
    )
    accumulate: str | None = option(
        Maybe(Choice("local", "scatter")),
        None,
        "gradients of micro-batches: kept whole and reduced once, or scattered each time; by "
        "default `local` for stage 1, else `scatter`",
    )
    gather: str = option(
        Choice("use", "step"),
        "use",
        "whole parameters (stage 3): gathered for each use, or once a step",
    )


@dataclass(frozen=True, kw_only=True)
class TensorStrategy(Strategy):
    """`tensor over tp`: single layers are split over ranks."""

    column: tuple[Pattern, ...] = patterns("column", "linear layers split along their outputs")
    row: tuple[Pattern, ...] = patterns("row", "linear layers split along their inputs")
    vocab: tuple[Pattern, ...] = patterns(
        "vocab", "embeddings and output heads split along the vocabulary"
    )
    replicate: tuple[Pattern, ...] = patterns("replicate", "layers that stay whole on every rank")
    sequence: bool = option(
        Switch(), False, "between the split layers, activations are split along the sequence"
    )
    style: str = option(
        Choice("auto", "manual"),
        "auto",
        "`auto` finds columns and rows for what no pattern names; `manual` splits only those",
    )
    overlap: bool = option(Switch(), False, "communication in pieces behind the matrix products")


@dataclass(frozen=True, kw_only=True)
class ContextStrategy(Strategy):
    """`context over cp`: each rank takes its part of the sequence."""

    along: tuple[Pattern, ...] = patterns(
        "along",
        "the names of the sizes that are sequences; by default dimension 1 of `int64[batch, seq]` and of "
        "`float32[batch, seq, width]`",
    )
    attention: str = option(
        Choice("gather", "ring", "ulysses", "usp"),
        "gather",
        "how attention sees the whole sequence; `usp` is `ulysses` over the last axis and `ring` "
        "over the first",
    )
    order: str = option(
        Choice("zigzag", "contiguous"),
        "zigzag",
        "which part a rank takes; `zigzag` balances causal attention",
    )


@dataclass(frozen=True, kw_only=True)
class PipelineStrategy(Strategy):
    """`pipeline over pp`: each rank takes some of the layers."""

    schedule: str = option(
        OneOf(
            Choice("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "auto"),
            Text('the file of a schedule, "name.csv",', wrong_schedule),
        ),
        "1f1b",
        "the order of forward and backward passes",
    )
    microbatches: int | None = option(
        Maybe(Whole(1, 1_000_000)), None, "parts that a batch is cut into"
    )
    split: str = option(
        Choice("auto", "equal"), "auto", "where stages begin: by cost, or by equal layer counts"
    )
    split_before: tuple[Pattern, ...] = patterns(
        "split before", "the modules at which a new stage begins, instead of `split = …`"
    )
    virtual: int | None = option(
        Maybe(Whole(1, 1_000)),
        None,
        "stages on each rank; by default 2 for `interleaved`, `zb_v` and `dualpipe_v`, else 1",
    )
    times: str | None = option(
        Maybe(Text("a trace's file name", wrong_path)),
        None,
        "a trace of a run (`planc run --trace`), whose times balance the stages and the schedule "
        "`auto`; by default they are predicted",
    )
    scatter_gather: bool = option(
        Switch(), False, "stages send tensor-parallel shards and gather them on arrival"
    )


# --- training ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RecomputeRule(Spec):
    """`recompute "layers.*" = selective`; of several rules, the last that matches counts."""

    patterns: tuple[Pattern, ...]
    policy: str  # "none" | "full" | "selective" | "fit"
    limit: int | None = None  # bytes, for "fit"


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec(Spec):
    """`precision { … }`; dtypes are torch names. See `compiler.precision`."""

    compute: str | None = option(
        Maybe(DTYPE), None, "dtype of forward and backward; by default the model's own"
    )
    reduce: str | None = option(
        Maybe(DTYPE),
        None,
        "dtype in which gradients are accumulated and reduced; by default that of `master`",
    )
    master: str | None = option(
        Maybe(DTYPE),
        None,
        "dtype of the parameters that the optimizer updates; by default the model's own",
    )
    autocast: bool = option(
        Switch(),
        False,
        "choose the dtype per operation, as torch.autocast does; `compute` is the lower one, by "
        "default `bf16`",
    )
    loss_scale: str | float | None = option(
        Maybe(OneOf(Choice("dynamic"), Real(0, open_low=True))),
        None,
        "factor on the loss; by default `dynamic` when compute is `fp16`, else `none`",
    )


@dataclass(frozen=True, kw_only=True)
class AdamWOptions:
    """The options of `optimizer adamw`, with torch.optim.AdamW's defaults."""

    lr: float = option(Real(0), 1e-3, "learning rate")
    betas: tuple[float, float] = option(
        Several(Real(0, 1, open_high=True), 2), (0.9, 0.999), "decay of the two running averages"
    )
    eps: float = option(Real(0), 1e-8, "added to the denominator")
    weight_decay: float = option(Real(0), 1e-2, "decoupled weight decay")


@dataclass(frozen=True, kw_only=True)
class SGDOptions:
    """The options of `optimizer sgd`, with torch.optim.SGD's defaults."""

    lr: float = option(Real(0), 1e-3, "learning rate")
    momentum: float = option(Real(0), 0.0, "momentum")
    dampening: float = option(Real(), 0.0, "dampening of the momentum")
    weight_decay: float = option(Real(0), 0.0, "weight decay (L2)")
    nesterov: bool = option(Switch(), False, "Nesterov momentum")


OPTIMIZERS: dict[str, type] = {"adamw": AdamWOptions, "sgd": SGDOptions}


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(Spec):
    """`optimizer adamw { … }`; `options` are the optimizer's own, complete, as torch names them."""

    name: str
    options: Mapping[str, object]
    schedule: str = option(
        Choice("constant", "linear", "cosine"), "constant", "the learning rate after the warm-up"
    )
    warmup: int = option(Whole(0), 0, "steps in which the learning rate grows from 0")
    total: int | None = option(
        Maybe(Whole(1)), None, "steps until `min_lr`; by default those of the run"
    )
    min_lr: float = option(Real(0), 0.0, "where `linear` and `cosine` end")
    decay: tuple[Pattern, ...] = patterns(
        "decay", "parameters with weight decay; by default all"
    )
    no_decay: tuple[Pattern, ...] = patterns("no_decay", "parameters without weight decay")


@dataclass(frozen=True, kw_only=True)
class ClipSpec(Spec):
    """`clip grad_norm = 1.0`."""

    grad_norm: float | None = option(
        Maybe(Real(0, open_low=True)), None, "largest norm of all gradients together"
    )
    grad_value: float | None = option(
        Maybe(Real(0, open_low=True)), None, "largest absolute value of a gradient's element"
    )


@dataclass(frozen=True, kw_only=True)
class TrainSpec(Spec):
    """`train { … }`: the run."""

    data: str = option(
        Text("a data source", wrong_data),
        "synthetic",
        '"synthetic", "text:<folder>", "text:stdlib" or "module:function"',
    )
    steps: int | None = option(Maybe(Whole(1)), None, "optimizer steps of the run")
    epochs: int | None = option(
        Maybe(Whole(1)), None, "passes over the data; by default 1 if `steps` is not given"
    )
    seed: int = option(Whole(0), 0, "of parameters, sampling and dropout")
    shuffle: bool = option(Switch(), True, "visit the samples in random order")
    save_every: int | None = option(Maybe(Whole(1)), None, "steps between checkpoints")
    keep: int = option(Whole(1), 2, "checkpoints kept; older ones are deleted")
    log: str | None = option(
        Maybe(Text("a file name", wrong_path)), None, "file for one JSON line per step; steps count from 1"
    )
    directory: str | None = option(
        Maybe(Text("a folder name", wrong_path)),
        None,
        "folder of the run; by default `runs/` and the plan's name",
    )


# --- the whole ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked plan. What the text leaves out has its default."""

    path: str = field(compare=False)
    text: str = field(compare=False, repr=False)
    names: Mapping[str, int | float]
    model: ModelSpec
    inputs: tuple[InputSpec, ...]
    loss: LossSpec | None = None
    mesh: tuple[MeshAxis, ...] = ()
    cluster: ClusterSpec | None = None
    data: DataStrategy | None = None
    zero: ZeroStrategy | None = None
    tensor: TensorStrategy | None = None
    context: ContextStrategy | None = None
    pipeline: PipelineStrategy | None = None
    recompute: tuple[RecomputeRule, ...] = ()
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    optimizer: OptimizerSpec | None = None
    clip: ClipSpec | None = None
    opaque: tuple[Pattern, ...] = ()
    per_sample: tuple[Pattern, ...] = ()
    local_statistics: tuple[Pattern, ...] = ()
    segments: tuple[Pattern, ...] = ()
    freeze: tuple[Pattern, ...] = ()
    train: TrainSpec = field(default_factory=TrainSpec)
    mode: str = "train"
    microbatches: int = 1
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    warnings: tuple[Diagnostic, ...] = field(default=(), compare=False)

    @property
    def ranks(self) -> int:
        """The number of devices: the product of the mesh's axes."""
        product = 1
        for axis in self.mesh:
            product *= axis.size
        return product

    def axis_size(self, name: str) -> int:
        """The size of a mesh axis; an axis that the mesh does not have counts as 1."""
        return next((axis.size for axis in self.mesh if axis.name == name), 1)

    @property
    def strategies(self) -> dict[str, Strategy]:
        """The strategies that the plan asks for, by their word."""
        words = ("data", "zero", "tensor", "context", "pipeline")
        return {w: s for w in words if (s := getattr(self, w)) is not None}
