"""What to capture, and what capture answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from compiler.capture.rows import Use
from compiler.diagnostics import Span
from compiler.ir.graph import Graph
from compiler.precision import Autocast, Precision

if TYPE_CHECKING:
    from compiler.dsl.plan import Plan


@dataclass(frozen=True)
class Input:
    """One tensor that the model's forward takes by name. `dtype` is a torch name ("int64")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    batch_dim: int | None = 0
    span: Span | None = None


@dataclass(frozen=True)
class CaptureRequest:
    """The model, its inputs, and what to do with it.

    - `factory`, `options`, `base`: see `runtime.factory.build`.
    - `loss`: None if forward returns the loss, else a function and its options, called as
      `function(outputs, batch, **options)` with what forward returned and the batch as a dict. It returns the loss, or
      a dict with "loss" and metrics.
    - `dtype`: convert floating parameters, buffers and inputs to it. With "float64", for verification, also the casts
      to narrower types that the model writes out become casts to float64.
    - `compute`: the forward reads parameters and floating inputs in this dtype; buffers stay as they are.
    - `autocast`: each operation's dtype is chosen as torch.autocast does.
    - `opaque`, `freeze`: patterns of module paths to run as they are, and of parameters to leave untrained.
    - `named`: what else the plan names modules for, by statement: patterns, each of which must fit one.
    - `keep_outputs`: keep every output as "output:NAME" and ask for no loss (programs that only go forward).
    - `train`: the loss will be differentiated, so something must learn. Else the model is in evaluation mode.
    - `check_rows`: find out whether the model calculates with the number of rows (see `compiler.capture.rows`).
    - `span`, `option_spans`, `loss_span`: places in the plan for diagnostics; `sources` are the texts they are in.
    """

    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    inputs: Sequence[Input] = ()
    loss: tuple[str, Mapping[str, Any]] | None = None
    dtype: str | None = None
    compute: str | None = None
    autocast: Autocast | None = None
    opaque: Sequence[Any] = ()
    freeze: Sequence[Any] = ()
    named: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    keep_outputs: bool = False
    train: bool = True
    check_rows: bool = False
    span: Span | None = None
    option_spans: Mapping[str, Span] = field(default_factory=dict)
    loss_span: Span | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def from_plan(
        plan: Plan, rows_multiple: int = 1, dtype: str | None = None, check_rows: bool = False
    ) -> CaptureRequest:
        """What a plan asks for. Batch dimensions are rounded up to a multiple of `rows_multiple`; `dtype` takes the
        place of the plan's precision."""
        precision = Precision.of(plan, widen=dtype is not None)
        return CaptureRequest(
            factory=plan.model.factory,
            options=dict(plan.model.options),
            base=str(plan.model.folder.resolve()),
            inputs=tuple(_rounded(spec, rows_multiple) for spec in plan.inputs),
            loss=(plan.loss.factory, dict(plan.loss.options)) if plan.loss is not None else None,
            dtype=dtype,
            compute=precision.compute,
            autocast=precision.autocast,
            check_rows=check_rows,
            opaque=plan.opaque,
            freeze=plan.freeze,
            named={
                "segment": plan.segments,
                "per_sample": plan.per_sample,
                "local_statistics": plan.local_statistics,
                "recompute": [pattern for rule in plan.recompute for pattern in rule.patterns],
            },
            keep_outputs=plan.mode == "forward" and plan.loss is None,
            train=plan.mode == "train",
            span=plan.model.factory_span,
            option_spans=dict(plan.model.option_spans),
            loss_span=plan.loss.factory_span if plan.loss is not None else None,
            sources=plan.sources,
        )


def _rounded(spec: Any, multiple: int) -> Input:
    shape = list(spec.shape)
    if spec.batch_dim is not None:
        shape[spec.batch_dim] = -(-shape[spec.batch_dim] // multiple) * multiple
    return Input(spec.name, spec.dtype, tuple(shape), spec.batch_dim, spec.span)


@dataclass(frozen=True)
class ParameterInfo:
    """`dtype` is what the graph reads, `own` what the model has. `used`: the loss or another output depends on it."""

    shape: tuple[int, ...]
    dtype: str
    own: str
    requires_grad: bool
    used: bool


@dataclass(frozen=True)
class BufferInfo:
    """`persistent`: part of the model's state dict. `mutated`: the forward gives it a new value."""

    shape: tuple[int, ...]
    dtype: str
    persistent: bool
    mutated: bool


@dataclass
class Captured:
    """A model as a graph, and what the graph does not say about it.

    - `parameters`, `buffers`: by logical name, in the model's order, tied ones once.
    - `constants`: real tensors that the graph uses and that have no name in the model.
    - `ties`: other names of parameters and buffers → the name they go by.
    - `modules`: module path → class name. `lists`: path of each ModuleList, and of each Sequential and ModuleDict of
      several children → their paths.
    - `notes`: what the user should know (an output that was dropped).
    - `counts_rows`: where the model calculates with the number of rows as a number, if it does and that was asked.
    """

    graph: Graph
    parameters: dict[str, ParameterInfo]
    buffers: dict[str, BufferInfo]
    constants: dict[str, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    counts_rows: Use | None = None


