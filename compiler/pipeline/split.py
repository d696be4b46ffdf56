"""Stages: which pipeline stage runs each call.

Calls keep their order, so a stage is a run of consecutive calls. `split = auto` makes the slowest stage as fast as can
be (`compiler.pipeline.cuts`), with every call weighed as what it is: an embedding by the bytes that it moves, a head by
its products, a loss by both. Each stage has to fit its device's memory, with as many micro-batches alive as the schedule
has there.

Calls that depend on no parameter, but for the batch alone (rotary tables, masks), are *replicated* where that is faster
than sending their results: every stage that needs them runs them itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiler.analysis.machine import Machine
from compiler.diagnostics import Diagnostic, PlanError
from compiler.dsl.plan import Plan
from compiler.pipeline.cuts import Problem, best_cuts
from compiler.pipeline.finer import finer
from compiler.pipeline.loads import Load, Run, Runs
from compiler.pipeline.points import equal_points, split_points
from compiler.schedule.actions import Pipeline
from compiler.schedule.costs import StageCosts
from compiler.schedule.timing import peak_activations


@dataclass(frozen=True)
class Stage:
    """A stage: its calls (replicated ones apart), what they cost for one micro-batch, and in how many micro-batches at
    once their activations are alive."""

    calls: tuple[str, ...]
    run: Run
    in_flight: int


@dataclass(frozen=True)
class Assignment:
    """Which stage runs each call. `replicated` are calls that several stages run, each for itself."""

    stages: tuple[Stage, ...]
    replicated: Mapping[str, tuple[int, ...]]

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of each call that is not replicated."""
        return {name: k for k, stage in enumerate(self.stages) for name in stage.calls}

    def costs(
        self, schedule: Pipeline, machine: Machine, axes: tuple[str, ...], memory: int | None = None
    ) -> StageCosts:
        """What schedules are timed with. `axes`: those of the pipeline; `memory`: bytes of a device, of which activations
        get what the fullest rank's `resident` bytes leave."""
        runs = [stage.run for stage in self.stages]
        return StageCosts(
            tuple(run.forward.seconds for run in runs),
            tuple(run.input.seconds for run in runs),
            tuple(run.weight.seconds for run in runs),
            tuple(run.activation for run in runs),
            None if memory is None else max(0, memory - max(self.resident(schedule))),
            machine.communication("send", axes, max(run.received for run in runs)),
        )

    def resident(self, schedule: Pipeline) -> list[int]:
        """Bytes on each pipeline rank beside activations: parameters with their state, and what a running call needs."""
        found = []
        for rank in range(schedule.ranks):
            own = [stage.run for stage, where in zip(self.stages, schedule.rank_of) if where == rank]
            found.append(sum(run.state for run in own) + max(run.transient for run in own))
        return found


def assign_stages(
    plan: Plan, loads: Sequence[Load], schedule: Pipeline, state: Mapping[str, int], machine: Machine,
    reported: frozenset[str] = frozenset(),
) -> Assignment:  # fmt: skip
    """Assign calls to the stages of a schedule, as the plan's `split` says.

    `state`: bytes that a rank holds of each parameter; `reported`: slots that are outputs of the step, and so have one
    producer. Raises PlanError.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    replicas = {load.name: load for load in replicable(loads, reported) if cheaper(load, machine, pipeline.axes)}
    placed = [load for load in loads if load.name not in replicas]
    stages = schedule.stages
    if len(placed) < stages:
        message = f"{stages} pipeline stages, but the model has only {len(placed)} segment{'s' * (len(placed) != 1)}"
        patterns = ", ".join(f'"{pattern}"' for pattern in finer(placed, stages, state))
        help = (f"use fewer stages, or cut the model finer: segment {patterns}" if patterns else "use fewer stages",)
        raise PlanError([Diagnostic("error", "E232", message, pipeline.span, help=help)], plan.sources)
    runs, in_flight = Runs(placed, replicas, state), peak_activations(schedule).stages
    if pipeline.split_before:
        firsts = split_points(plan, placed, stages)
    elif pipeline.split == "equal":
        firsts = equal_points(plan, placed, stages)
    else:
        limit = machine.device.memory if plan.cluster is not None else None
        firsts = best_cuts(problem(runs, schedule, in_flight, limit))
    ends = (*firsts[1:], len(placed))
    found = tuple(
        Stage(tuple(load.name for load in placed[first:end]), runs(first, end), count)
        for first, end, count in zip(firsts, ends, in_flight)
    )
    copies = {name: tuple(k for k, stage in enumerate(found) if name in stage.run.replicas) for name in replicas}
    return Assignment(found, copies)


def problem(runs: Runs, schedule: Pipeline, in_flight: Sequence[int], limit: int | None) -> Problem:
    """The cut that `split = auto` looks for. A rank's memory is shared evenly by its stages."""
    each = [schedule.rank_of.count(rank) for rank in schedule.rank_of]

    def memory(stage: int, first: int, end: int) -> int:
        run = runs(first, end)
        return (run.state + in_flight[stage] * run.activation) * each[stage] + run.transient

    return Problem(len(runs.loads), schedule.stages, runs, memory, limit)


def replicable(loads: Sequence[Load], reported: frozenset[str]) -> list[Load]:
    """Calls that any stage can run: they read the batch, buffers and each other's results, and nobody else has to know."""
    found: list[Load] = []
    slots: set[str] = set()
    for load in loads:
        call = load.call
        free = not load.parameters and not call.gradients and reported.isdisjoint(call.results)
        if free and slots.issuperset(load.slots):
            found.append(load)
            slots.update(call.results)
    return found


def cheaper(load: Load, machine: Machine, axes: tuple[str, ...]) -> bool:
    """Whether a stage runs the call in less time than it would receive its results."""
    return load.cost.forward.seconds <= machine.communication("send", axes, sum(load.cost.result_bytes))
