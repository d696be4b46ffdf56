"""The rules between statements: each a function of the whole plan that yields what breaks it.

A rule sees the plan as far as it could be built: a part with errors of its own may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

from compiler.diagnostics import Diagnostics, Label, Span, did_you_mean
from compiler.dsl.plan import Plan, Spec


@dataclass(frozen=True)
class Finding:
    """What one rule found."""

    code: str
    message: str
    span: Span
    help: str | tuple[str, ...] = ()
    related: tuple[Label, ...] = field(default=())
    severity: str = "error"


Rule = Callable[[Plan], Iterator[Finding]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Add a function to `RULES`."""
    RULES.append(function)
    return function


def apply_rules(plan: Plan, diagnostics: Diagnostics) -> None:
    """Report everything that any rule finds."""
    for each in RULES:
        for f in each(plan):
            if f.severity == "warning" and diagnostics.errors:
                continue  # what is wrong may be why it seems without use
            record = diagnostics.error if f.severity == "error" else diagnostics.warning
            record(f.code, f.message, f.span, help=f.help, related=f.related)


def at(spec: Spec, option: str) -> Span:
    """Where an option was written, or else its statement."""
    return spec.given.get(option, spec.span)


# --- axes --------------------------------------------------------------------------------

# Pairs of strategies that may share an axis: ZeRO shards what data and context replicate.
_COMPATIBLE = {frozenset(pair) for pair in (("data", "zero"), ("context", "zero"))}


@rule
def axes_exclude_each_other(plan: Plan) -> Iterator[Finding]:
    """One axis splits one thing: batch, sequence, layers or stages."""
    for (one, first), (two, second) in combinations(plan.strategies.items(), 2):
        if frozenset((one, two)) in _COMPATIBLE:
            continue
        for axis in first.axes:
            if axis in second.axes:
                yield Finding(
                    "E061",
                    f"`{one}` and `{two}` cannot both go over `{axis}`",
                    second.axes_span,
                    "give each its own axis of the mesh",
                    (Label(first.axes_span, f"`{one}` goes over `{axis}` here"),),
                )


@rule
def zero_needs_replicas(plan: Plan) -> Iterator[Finding]:
    """ZeRO shards over axes on which `data` or `context` replicate the parameters."""
    if plan.zero is None:
        return
    mesh = {axis.name for axis in plan.mesh}
    if not all(axis in mesh for s in plan.strategies.values() for axis in s.axes):
        return  # an unknown axis may be a misspelling of the one that is missing
    replicated = [a for s in (plan.data, plan.context) if s for a in s.axes]
    taken = [a for s in (plan.tensor, plan.pipeline) if s for a in s.axes]
    for axis in plan.zero.axes:
        if axis not in replicated and axis not in taken:
            yield Finding(
                "E065",
                f"`zero` goes over `{axis}`, where neither `data` nor `context` goes",
                plan.zero.axes_span,
                f"add `data over {axis}`",
            )


@rule
def hybrid_divides(plan: Plan) -> Iterator[Finding]:
    """A hybrid group is a whole part of ZeRO's axes."""
    if plan.zero and plan.zero.hybrid:
        size = _product(plan, plan.zero.axes)
        if size % plan.zero.hybrid:
            yield Finding(
                "E043",
                f"groups of {plan.zero.hybrid} do not divide {size} ranks",
                at(plan.zero, "hybrid"),
                f"choose a divisor of {size}",
            )


@rule
def offloaded_parameters_are_sharded(plan: Plan) -> Iterator[Finding]:
    """Parameters leave the device only where they are gathered for their use: with stage 3."""
    zero = plan.zero
    if zero and zero.offload in ("params", "all") and zero.stage < 3:
        yield Finding(
            "E043",
            f"`offload = {zero.offload}` needs `stage = 3`: with stage {zero.stage} whole parameters stay on the device",
            at(zero, "offload"),
            "use `stage = 3`, or `offload = optimizer`",
        )


@rule
def unused_axes(plan: Plan) -> Iterator[Finding]:
    """Ranks along an axis that nothing uses all do the same work."""
    used = {axis for s in plan.strategies.values() for axis in s.axes}
    for axis in plan.mesh:
        if axis.size > 1 and axis.name not in used:
            yield Finding(
                "W002",
                f"no strategy goes over `{axis.name}`: its {axis.size} ranks do the same work",
                axis.span,
                f"for example: data over {axis.name}",
                severity="warning",
            )


@rule
def usp_axes(plan: Plan) -> Iterator[Finding]:
    """Only `usp` knows what to do with two axes."""
    context = plan.context
    if context and len(context.axes) == 2 and context.attention != "usp":
        yield Finding(
            "E062",
            f"`attention = {context.attention}` goes over one axis",
            at(context, "attention"),
            "two axes are for `attention = usp`",
        )
    if context and len(context.axes) == 1 and context.attention == "usp":
        yield Finding(
            "E062",
            "`attention = usp` goes over two axes: `context over ring_axis, ulysses_axis`",
            at(context, "attention"),
        )


@rule
def sequences_are_sizes(plan: Plan) -> Iterator[Finding]:
    """`along` names sizes that inputs are written with."""
    names = [name for spec in plan.inputs for name in spec.dim_names if name]
    for pattern in plan.context.along if plan.context else ():
        if not any(pattern.matches(name) for name in names):
            yield Finding(
                "E068",
                f'`along "{pattern.text}"` names no size of an input',
                pattern.span,
                did_you_mean(pattern.text, names) or ("give the size a name: seq = 1024, and int64[batch, seq]",),
            )


@rule
def cluster_matches_mesh(plan: Plan) -> Iterator[Finding]:
    """The cluster has as many devices as the mesh."""
    cluster = plan.cluster
    if cluster is None or not plan.mesh:
        return
    if cluster.devices is None:
        if plan.ranks % cluster.nodes:
            yield Finding(
                "E063",
                f"the mesh's {plan.ranks} ranks cannot be shared out over {cluster.nodes} nodes",
                at(cluster, "nodes"),
            )
        return
    devices = cluster.nodes * cluster.devices
    if devices != plan.ranks:
        shape = " × ".join(f"{a.name}={a.size}" for a in plan.mesh)
        yield Finding(
            "E063",
            f"the cluster has {devices} devices, the mesh has {plan.ranks} ranks ({shape})",
            at(cluster, "devices"),
            related=(Label(plan.mesh[0].span.to(plan.mesh[-1].span), f"{plan.ranks} ranks"),),
        )


# --- pipeline ----------------------------------------------------------------------------

_TWO_STAGES = ("interleaved", "zb_v", "dualpipe_v")


@rule
def microbatches_agree(plan: Plan) -> Iterator[Finding]:
    """A batch is cut into micro-batches once."""
    data, pipeline = plan.data, plan.pipeline
    if data and pipeline and data.microbatches and pipeline.microbatches:
        if data.microbatches != pipeline.microbatches:
            yield Finding(
                "E064",
                f"`pipeline` says {pipeline.microbatches} micro-batches, "
                f"`data` says {data.microbatches}",
                at(pipeline, "microbatches"),
                "say it in one place",
                (Label(at(data, "microbatches"), f"{data.microbatches} here"),),
            )


@rule
def virtual_stages(plan: Plan) -> Iterator[Finding]:
    """Several stages on a rank need a schedule that knows what to do with them."""
    pipeline = plan.pipeline
    if pipeline is None or pipeline.virtual is None:
        return
    if pipeline.virtual > 1 and pipeline.schedule in ("gpipe", "1f1b", "zb_h1"):
        yield Finding(
            "E067",
            f"the schedule `{pipeline.schedule}` has one stage on each rank",
            at(pipeline, "virtual"),
            "several stages on a rank are for `schedule = interleaved`",
        )
    if pipeline.schedule in ("zb_v", "dualpipe_v") and pipeline.virtual != 2:
        yield Finding(
            "E067",
            f"the schedule `{pipeline.schedule}` has exactly two stages on each rank",
            at(pipeline, "virtual"),
        )
    if pipeline.schedule == "interleaved" and pipeline.virtual < 2:
        yield Finding(
            "E067",
            "the schedule `interleaved` has at least two stages on each rank",
            at(pipeline, "virtual"),
        )


@rule
def split_points(plan: Plan) -> Iterator[Finding]:
    """n split points make n + 1 stages."""
    pipeline = plan.pipeline
    if pipeline is None or not pipeline.split_before:
        return
    if "split" in pipeline.given:
        yield Finding(
            "E067",
            "`split = …` and `split before …` exclude each other",
            at(pipeline, "split"),
            related=(Label(at(pipeline, "split_before"), "split points are given here"),),
        )
    exact = not any(c in p.text for p in pipeline.split_before for c in "*?[")
    known = pipeline.schedule != "auto" and not pipeline.schedule.endswith(".csv")
    stages = _product(plan, pipeline.axes) * stages_per_rank(plan)
    found = len(pipeline.split_before)
    if exact and known and found + 1 != stages:
        yield Finding(
            "E067",
            f"{found} split point{' makes' if found == 1 else 's make'} {found + 1} stages, "
            f"the pipeline has {stages}",
            at(pipeline, "split_before"),
            f"give {stages - 1} split point{'s' * (stages != 2)}",
        )


def stages_per_rank(plan: Plan) -> int:
    """Stages on each rank of the pipeline, as given or as the schedule has it."""
    if plan.pipeline is None:
        return 1
    return plan.pipeline.virtual or (2 if plan.pipeline.schedule in _TWO_STAGES else 1)


# --- tensor ------------------------------------------------------------------------------


@rule
def one_pattern_one_way(plan: Plan) -> Iterator[Finding]:
    """A layer is split in one way."""
    if plan.tensor is None:
        return
    seen: dict[str, tuple[str, Span]] = {}
    for word in ("column", "row", "vocab", "replicate"):
        for pattern in getattr(plan.tensor, word):
            if pattern.text in seen and seen[pattern.text][0] != word:
                other, span = seen[pattern.text]
                yield Finding(
                    "E067",
                    f"the pattern is both `{other}` and `{word}`",
                    pattern.span,
                    related=(Label(span, f"`{other}` here"),),
                )
            seen.setdefault(pattern.text, (word, pattern.span))


@rule
def manual_needs_patterns(plan: Plan) -> Iterator[Finding]:
    """`style = manual` without patterns splits nothing."""
    tensor = plan.tensor
    if tensor and tensor.style == "manual":
        if not (tensor.column or tensor.row or tensor.vocab):
            yield Finding(
                "E066",
                "`style = manual` splits only what patterns name, and there are none",
                at(tensor, "style"),
                'add `column "…"` and `row "…"`, or write `style = auto`',
            )


# --- training ----------------------------------------------------------------------------


@rule
def optimizer_is_consistent(plan: Plan) -> Iterator[Finding]:
    """What torch's optimizers and the schedules demand."""
    optimizer = plan.optimizer
    if optimizer is None:
        return
    if optimizer.options.get("nesterov"):
        if not optimizer.options["momentum"] or optimizer.options["dampening"]:
            yield Finding(
                "E066",
                "`nesterov` needs a `momentum` above 0 and no `dampening`",
                at(optimizer, "nesterov"),
            )
    total = optimizer.total or plan.train.steps
    if total is not None and optimizer.warmup > total:
        yield Finding(
            "E067",
            f"the warm-up of {optimizer.warmup} steps is longer than the {total} steps in all",
            at(optimizer, "warmup"),
        )
    if optimizer.min_lr > optimizer.options["lr"]:
        yield Finding(
            "E067",
            f"`min_lr` is above `lr` ({optimizer.options['lr']:g})",
            at(optimizer, "min_lr"),
        )
    if "min_lr" in optimizer.given and optimizer.schedule == "constant":
        yield Finding(
            "W003",
            "`min_lr` has no effect with `schedule = constant`",
            at(optimizer, "min_lr"),
            severity="warning",
        )
    both = {p.text for p in optimizer.decay} & {p.text for p in optimizer.no_decay}
    for pattern in optimizer.no_decay:
        if pattern.text in both:
            yield Finding("E067", "the pattern is both `decay` and `no_decay`", pattern.span)


@rule
def autocast_has_a_lower_dtype(plan: Plan) -> Iterator[Finding]:
    """Autocast chooses between float32 and a dtype of 16 bits."""
    precision = plan.precision
    if precision.autocast and precision.compute in ("float32", "float64"):
        yield Finding(
            "E067",
            f"`autocast = on` chooses between float32 and a dtype of 16 bits, not {precision.compute}",
            at(precision, "compute"),
            "write `compute = bf16` or `compute = fp16`",
        )


@rule
def scaled_gradients_are_wide(plan: Plan) -> Iterator[Finding]:
    """What the loss scale keeps from vanishing in float16 would vanish when it is taken off again."""
    precision = plan.precision
    dynamic = precision.compute == "float16" and "loss_scale" not in precision.given
    narrow = "reduce" if precision.reduce else "master"
    if (precision.loss_scale or dynamic) and getattr(precision, narrow) == "float16":
        yield Finding(
            "E067",
            f"with a loss scale, `{narrow} = fp16` makes small gradients vanish when the scale is taken off",
            at(precision, narrow),
            "accumulate and reduce gradients in a wider dtype: `reduce = fp32`",
        )


@rule
def steps_or_epochs(plan: Plan) -> Iterator[Finding]:
    """A run has one length."""
    if plan.train.steps and plan.train.epochs:
        yield Finding(
            "E067",
            "`steps` and `epochs` exclude each other",
            at(plan.train, "epochs"),
            related=(Label(at(plan.train, "steps"), "`steps` is given here"),),
        )


@rule
def forward_trains_nothing(plan: Plan) -> Iterator[Finding]:
    """Without a backward pass some statements do nothing."""
    if plan.mode != "forward":
        return
    given = [(word, getattr(plan, word)) for word in ("optimizer", "zero", "clip")]
    for word, spec in [*given, *(("recompute", rule) for rule in plan.recompute)]:
        if spec is not None:
            yield Finding(
                "W003",
                f"`{word}` has no effect with `mode = forward`",
                spec.span,
                severity="warning",
            )


def _product(plan: Plan, axes: tuple[str, ...]) -> int:
    size = 1
    for axis in axes:
        size *= plan.axis_size(axis)
    return size
