"""What planc cannot do without changing what is computed: said at compile time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from compiler.capture.failures import line_span, place_of
from compiler.capture.rows import Use
from compiler.diagnostics import Diagnostic, Diagnostics, Label, PlanError, declare_codes, did_you_mean
from compiler.dsl.plan import Plan
from compiler.ir.graph import Graph, Node, Origin
from compiler.layout.propagate import TimeMixing
from compiler.passes.lower_support import LoweringError

declare_codes(
    {
        "E202": "an operator mixes the samples of several micro-batches",
        "E203": "an operator that cannot keep its meaning in a plan",
        "E204": "a batch that does not divide, and a model that calculates with its size",
        "E205": "a tensor-parallel pattern that names no parameters",
        "W205": "a weight-decay pattern that names no parameter",
        "W206": "a batch of which much is padding",
        "W207": "a pipeline with fewer micro-batches than ranks",
    }
)

MUCH_PADDING = 0.25


def check_parts(plan: Plan, rows: int | None, ways: int) -> list[Diagnostic]:
    """Warnings about work that is wasted: rows that are padding, ranks of a pipeline that wait."""
    found = Diagnostics()
    padded = -(-rows // ways) * ways if rows is not None else 0
    if rows is not None and padded and 1 - rows / padded > MUCH_PADDING:
        spec = next(spec for spec in plan.inputs if spec.batch_dim is not None)
        found.warning(
            "W206",
            f"{1 - rows / padded:.0%} of the work is padding: {rows} rows in {ways} parts of {padded // ways}",
            spec.span,
            help=f"use a batch of {padded} rows, or fewer ranks or micro-batches",
        )
    pipeline = plan.pipeline
    ranks = max((plan.axis_size(axis) for axis in pipeline.axes), default=1) if pipeline is not None else 1
    if pipeline is not None and 1 < ranks and plan.microbatches < ranks and plan.mode == "train":
        found.warning(
            "W207",
            f"{plan.microbatches} micro-batch{'es' if plan.microbatches > 1 else ''} for {ranks} pipeline ranks: "
            "most of them wait most of the time",
            pipeline.given.get("microbatches", pipeline.span),
            help=f"use at least {ranks} micro-batches, better {4 * ranks}: pipeline over … {{ microbatches = {4 * ranks} }}",
        )
    return found.warnings


def check_decays(plan: Plan, parameters: Iterable[str]) -> list[Diagnostic]:
    """Warnings about patterns of `decay` and `no_decay` that fit no parameter."""
    names, found = list(parameters), Diagnostics()
    spec = plan.optimizer
    for word, patterns in (("decay", spec.decay), ("no_decay", spec.no_decay)) if spec is not None else ():
        for pattern in patterns:
            if not any(pattern.matches(name) for name in names):
                message = f'`{word} "{pattern.text}"` names no parameter of the model'
                found.warning("W205", message, pattern.span, help=did_you_mean(pattern.text, names))
    return found.warnings


def explain_time_mixing(plan: Plan, mixing: TimeMixing, graph: Graph, modules: Mapping[str, str]) -> PlanError:
    """The diagnostic for a model that does not keep its meaning over micro-batches."""
    origin = mixing.node.origin
    strategy = plan.pipeline if plan.pipeline and plan.pipeline.microbatches else plan.data
    span = (strategy.given.get("microbatches") or strategy.span) if strategy else None
    normalises = "BatchNorm" in modules.get(origin.module, "")
    own = (f'or accept statistics of each part by itself: local_statistics "{origin.module}"',) if normalises else ()
    where = f" in `{origin.module}`" if origin.module else ""
    roles = roles_of(mixing.node, graph)
    if roles and all(role.startswith("metric:") for role in roles):
        metrics = ", ".join(f"metric {role.removeprefix('metric:')}" for role in roles)
        own = (f"it is for the {metrics} alone: leave that out, or compute it from the logged loss", *own)
    diagnostic = Diagnostic(
        "error",
        "E202",
        f"`{mixing.node.op.split('.')[1]}`{where} mixes the samples of the whole batch",
        span,
        label=f"but the batch is computed in {plan.microbatches} micro-batches",
        notes=(
            f"it needs %{mixing.value.name} of all micro-batches at once, and that depends on parameters: "
            "its gradients would differ from those on one device",
        ),
        help=(
            "use microbatches = 1 (more data-parallel ranks, or recompute, save memory too)",
            *own,
        ),
        related=model_line(origin),
    )
    return PlanError([diagnostic], plan.sources)


def roles_of(node: Node, graph: Graph) -> list[str]:
    """The outputs of a graph that depend on a node of it."""
    reached = graph.dependents(out for out in node.outputs if out is not None)
    return [role for role, value in graph.outputs.items() if value in reached]


def check_rows(plan: Plan, rows: int | None, ways: int, use: Use | None, joining: Node | None = None) -> None:
    """Padding an uneven batch would change a model that has the number of rows in its arithmetic (`use`), or that
    joins rows (`joining`). Raises PlanError."""
    if (use is None and joining is None) or rows is None or rows % ways == 0:
        return
    does = "calculates with the batch size" if use is not None else "works on the whole batch at once"
    place = Origin("", use.source, use.code) if use is not None else joining.origin if joining else Origin()
    spec = next(spec for spec in plan.inputs if spec.batch_dim is not None)
    up, down = -(-rows // ways) * ways, rows // ways * ways
    diagnostic = Diagnostic(
        "error",
        "E204",
        f"a batch of {rows} does not divide by {ways}, and the model {does}",
        spec.span,
        label=f"{rows} rows in {ways} parts (ranks x micro-batches)",
        notes=("the parts would be padded, and the model would see the padding",),
        help=(
            f"use a batch of {up}" + (f" or {down}" if down else ""),
            "or let the model take means (`loss.mean()`), which count real rows only",
        ),
        related=model_line(place),
    )
    raise PlanError([diagnostic], plan.sources)


def explain_lowering(plan: Plan, error: LoweringError) -> PlanError:
    """The diagnostic for a call that has no meaning under a plan."""
    help = (error.help,) if error.help else ()
    related, span = model_line(error.node.origin), plan.model.span
    if error.asked is not None:
        statement = getattr(plan, error.asked[0])
        span = statement.given.get(error.asked[1], statement.span)
    return PlanError([Diagnostic("error", "E203", error.message, span, help=help, related=related)], plan.sources)


def model_line(origin: Origin) -> tuple[Label, ...]:
    """The line of the model that a node comes from, as a second place of a diagnostic."""
    place = place_of(origin)
    return (Label(line_span(*place), "here"),) if place is not None else ()
