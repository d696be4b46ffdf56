"""From a plan's `pipeline` statement to its schedule, with messages that point into the plan or the schedule's file."""

from __future__ import annotations

from pathlib import Path

from compiler.diagnostics import Diagnostic, Diagnostics, PlanError, declare_codes
from compiler.dsl.files import read_text
from compiler.dsl.plan import PipelineStrategy, Plan
from compiler.schedule.actions import Pipeline, ScheduleError, forwards
from compiler.schedule.costs import StageCosts
from compiler.schedule.named import make_schedule
from compiler.schedule.table import parse_table

declare_codes(
    {
        "E220": "a schedule that the pipeline cannot have",
        "E221": "a schedule file that cannot be read, or whose schedule is incomplete or impossible",
    }
)


def plan_schedule(plan: Plan, costs: StageCosts | None = None) -> Pipeline:
    """The schedule of a plan with a pipeline. `costs` are those of its stages, for `auto`. Raises PlanError."""
    schedule = training_schedule(plan, costs)
    return forwards(schedule) if plan.mode == "forward" else schedule


def training_schedule(plan: Plan, costs: StageCosts | None) -> Pipeline:
    """The schedule with forwards and backwards. Raises PlanError."""
    strategy = plan.pipeline
    assert strategy is not None
    ranks = 1
    for axis in strategy.axes:
        ranks *= plan.axis_size(axis)
    if strategy.schedule.endswith(".csv"):
        return read_schedule(plan, ranks)
    try:
        return make_schedule(strategy.schedule, ranks, plan.microbatches, strategy.virtual, costs)
    except ScheduleError as error:
        place = strategy.given.get("schedule", strategy.span)
        help = (error.help,) if error.help else ()
        raise PlanError([Diagnostic("error", "E220", error.message, place, help=help)], plan.sources) from error


def check_schedule(plan: Plan) -> None:
    """What can be said of a plan's schedule before its stages are known. Raises PlanError."""
    if plan.pipeline is not None and plan.pipeline.schedule != "auto":
        plan_schedule(plan)


def read_schedule(plan: Plan, ranks: int) -> Pipeline:
    """The schedule in the file that the plan names. Raises PlanError."""
    strategy = plan.pipeline
    assert strategy is not None
    diagnostics = Diagnostics()
    path = schedule_path(plan, strategy)
    text = None
    if path.is_file():
        text = read_text(str(path), diagnostics)
    else:
        near = ", ".join(f"`{found.name}`" for found in sorted(path.parent.glob("*.csv"))[:5])
        diagnostics.error(
            "E221", f"there is no schedule file {path}", strategy.given.get("schedule", strategy.span),
            help=f"in that folder: {near}" if near else "the name is relative to the plan",
        )  # fmt: skip
    sources = {**plan.sources, str(path): text or ""}
    schedule = None
    if text is not None:
        schedule = parse_table(text, str(path), ranks, plan.microbatches, diagnostics)
    if schedule is not None and "virtual" in strategy.given and schedule.stages != ranks * (strategy.virtual or 1):
        diagnostics.error(
            "E220", f"the schedule has {schedule.stages} stages, not {strategy.virtual} on each of {ranks} ranks",
            strategy.given["virtual"], help="leave `virtual` out: the file says it",
        )  # fmt: skip
    diagnostics.raise_if_errors(sources)
    assert schedule is not None
    return schedule


def schedule_path(plan: Plan, strategy: PipelineStrategy) -> Path:
    """Where the schedule's file is: relative to the file whose text names it, from the command line to the plan."""
    span = strategy.given.get("schedule")
    file = span.file if span is not None and not span.file.startswith("--") else plan.path
    return Path(file).parent / strategy.schedule
