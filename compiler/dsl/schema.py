"""The table of statements: the form of each, the class it becomes, and how often it may stand.

With the option declarations in plan.py this is all that the front end knows about any single
statement; parsing, checking, `--set`, suggestions and the reference read it from here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from compiler.dsl import plan
from compiler.dsl.kinds import Choice, Kind
from compiler.dsl.names import WORDS
from compiler.dsl.options import default_of, patterns_of

ONCE = "once"
MANY = "many"


@dataclass(frozen=True)
class StatementKind:
    """One statement of the language.

    `form` is its terminal in grammar.lark; `spec` the class with its options; `field` the field
    of `Plan` that it fills; `axes` the least and greatest number of axes; `assumed` says that
    a plan without it behaves as if it stood there without options; `merges` that it may stand
    several times with different options.
    """

    word: str
    form: str
    usage: str
    doc: str
    spec: type | None = None
    field: str = ""
    times: str = ONCE
    axes: tuple[int, int] = (0, 0)
    choice: Kind | None = None
    free_options: bool = False
    assumed: bool = False
    merges: bool = False

    def absent(self) -> object:
        """What the plan's field holds when the statement is not there."""
        return default_of(plan.Plan, self.field)

    def item_words(self) -> list[str]:
        """The words that begin a pattern item in this statement's block."""
        if self.spec is None:
            return []
        return [p.words[0] for p in patterns_of(self.spec).values()]


MODE = Choice("train", "forward")

_TABLE = (
    StatementKind(
        "model",
        "FACTORY",
        'model "module.path:Name" { option = value }',
        "What is trained: a class or function that makes the `torch.nn.Module`.",
        plan.ModelSpec,
        "model",
        free_options=True,
    ),
    StatementKind(
        "loss",
        "FACTORY",
        'loss "module:function" { option = value }',
        "A function of the model's output and the batch, when the model does not return its loss.",
        plan.LossSpec,
        "loss",
        free_options=True,
    ),
    StatementKind(
        "input",
        "INPUT",
        "input name : dtype[size, size]",
        "One tensor of the batch.",
        plan.InputSpec,
        "inputs",
        times=MANY,
    ),
    StatementKind(
        "mesh",
        "PAIRS",
        "mesh pp=2 dp=4",
        "The devices as a grid with named axes; the last axis is the innermost.",
        plan.MeshAxis,
        "mesh",
        free_options=True,
    ),
    StatementKind(
        "cluster",
        "SECTION",
        "cluster { nodes = 1, devices = 8, device = h100 }",
        "The machines that estimates are made for.",
        plan.ClusterSpec,
        "cluster",
    ),
    StatementKind(
        "data",
        "STRATEGY",
        "data over dp { option = value }",
        "Data parallelism: each rank takes its part of the batch.",
        plan.DataStrategy,
        "data",
        axes=(1, 8),
    ),
    StatementKind(
        "zero",
        "STRATEGY",
        "zero over dp { stage = 1 }",
        "ZeRO: what data parallelism replicates is sharded.",
        plan.ZeroStrategy,
        "zero",
        axes=(1, 8),
    ),
    StatementKind(
        "tensor",
        "STRATEGY",
        'tensor over tp { column "pattern" row "pattern" }',
        "Tensor parallelism: single layers are split.",
        plan.TensorStrategy,
        "tensor",
        axes=(1, 1),
    ),
    StatementKind(
        "context",
        "STRATEGY",
        "context over cp { attention = ring }",
        "Context parallelism: the sequence is split.",
        plan.ContextStrategy,
        "context",
        axes=(1, 2),
    ),
    StatementKind(
        "pipeline",
        "STRATEGY",
        "pipeline over pp { schedule = 1f1b, microbatches = 8 }",
        "Pipeline parallelism: layers are split into stages.",
        plan.PipelineStrategy,
        "pipeline",
        axes=(1, 1),
    ),
    StatementKind(
        "recompute",
        "RULE",
        'recompute "pattern" = none | full | selective | fit(70GB)',
        "Which activations are computed again in the backward pass instead of being kept.",
        plan.RecomputeRule,
        "recompute",
        times=MANY,
    ),
    StatementKind(
        "precision",
        "SECTION",
        "precision { compute = bf16, reduce = fp32, master = fp32 }",
        "The dtypes of the computation.",
        plan.PrecisionSpec,
        "precision",
        assumed=True,
    ),
    StatementKind(
        "optimizer",
        "OPTIMIZER",
        "optimizer adamw { lr = 3e-4 }",
        "The optimizer and the schedule of its learning rate.",
        plan.OptimizerSpec,
        "optimizer",
    ),
    StatementKind(
        "clip",
        "PAIRS",
        "clip grad_norm = 1.0",
        "Gradient clipping.",
        plan.ClipSpec,
        "clip",
        merges=True,
    ),
    StatementKind(
        "opaque",
        "PATTERNS",
        'opaque "pattern", "pattern"',
        "Modules that run as they are, without being captured.",
        None,
        "opaque",
        times=MANY,
    ),
    StatementKind(
        "per_sample",
        "PATTERNS",
        'per_sample "pattern"',
        "Opaque modules that treat samples independently: each rank runs them on its own part of the batch.",
        None,
        "per_sample",
        times=MANY,
    ),
    StatementKind(
        "local_statistics",
        "PATTERNS",
        'local_statistics "pattern"',
        "Modules whose batch statistics are those of a rank's own part of the batch.",
        None,
        "local_statistics",
        times=MANY,
    ),
    StatementKind(
        "segment",
        "PATTERNS",
        'segment "pattern"',
        "Modules that begin a segment of their own.",
        None,
        "segments",
        times=MANY,
    ),
    StatementKind(
        "freeze",
        "PATTERNS",
        'freeze "pattern"',
        "Parameters that are not trained.",
        None,
        "freeze",
        times=MANY,
    ),
    StatementKind(
        "train",
        "SECTION",
        'train { data = "text:stdlib", steps = 100 }',
        "The run: data, length, seed, checkpoints.",
        plan.TrainSpec,
        "train",
        assumed=True,
    ),
    StatementKind(
        "mode",
        "CHOICE",
        "mode = train | forward",
        "Train, or only run forward.",
        None,
        "mode",
        choice=MODE,
        assumed=True,
    ),
    StatementKind(
        "include",
        "INCLUDE",
        'include "base.plan"',
        "Everything that another plan says, where this one says nothing else.",
        times=MANY,
    ),
)

STATEMENTS: dict[str, StatementKind] = {s.word: s for s in _TABLE}

NOT_NAMES = ("over", *WORDS)

REQUIRED = ("model", "input")

assert {s.field for s in _TABLE if s.field} <= {f.name for f in fields(plan.Plan)}
