"""Staging: a program's calls on pipeline ranks, and each rank's work in the order of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compiler.analysis.machine import Machine
from compiler.dsl.plan import Plan
from compiler.pipeline.loads import loads
from compiler.pipeline.measured import measured
from compiler.pipeline.split import Assignment, assign_stages
from compiler.schedule.actions import Pipeline
from compiler.schedule.costs import StageCosts
from compiler.schedule.pipeline import pipeline_work
from compiler.schedule.planned import plan_schedule
from compiler.schedule.stream import one_after_the_other
from compiler.schedule.work import CallInfo, Work

if TYPE_CHECKING:
    from compiler.link import Kind
    from compiler.segments.split import Segment


@dataclass(frozen=True)
class Staging:
    """`work[rank]` is what a pipeline rank does. Without a pipeline there is one rank, and no schedule."""

    work: list[list[Work]]
    schedule: Pipeline | None = None
    assignment: Assignment | None = None
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def of(self, call: str) -> tuple[int, ...]:
        """The pipeline ranks that run a call."""
        return self.ranks.get(call, (0,))

    def parameter_ranks(self, infos: Sequence[CallInfo]) -> dict[str, tuple[int, ...]]:
        """The pipeline ranks whose calls use each parameter."""
        found: dict[str, set[int]] = {}
        for info in infos:
            for name in info.parameters:
                found.setdefault(name, set()).update(self.of(info.call.name))
        return {name: tuple(sorted(ranks)) for name, ranks in found.items()}

    def costs(self, plan: Plan, machine: Machine) -> StageCosts | None:
        """What the stages of the schedule cost; None without a schedule."""
        if self.schedule is None or self.assignment is None or plan.pipeline is None:
            return None
        return self.assignment.costs(self.schedule, machine, plan.pipeline.axes)


def pipeline_axis(plan: Plan) -> str:
    """The mesh axis of the pipeline, "" where there is none or it has one rank."""
    axes = plan.pipeline.axes if plan.pipeline is not None else ()
    return next((axis for axis in axes if plan.axis_size(axis) > 1), "")


def stage(
    plan: Plan, infos: Sequence[CallInfo], segments: Sequence[Segment], kinds: Mapping[str, Kind],
    state: Mapping[str, int], machine: Machine, reported: frozenset[str],
) -> Staging:  # fmt: skip
    """Put the calls on stages and the stages on ranks; `state` and `reported` as `assign_stages` has them. Raises
    PlanError."""
    if not pipeline_axis(plan):
        return Staging([one_after_the_other(infos, plan.microbatches)])
    assert plan.pipeline is not None
    weighed = measured(plan, loads(segments, [info.call for info in infos], kinds, machine))
    schedule = plan_schedule(plan)
    assignment = assign_stages(plan, weighed, schedule, state, machine, reported)
    if plan.pipeline.schedule == "auto":
        memory = machine.device.memory if plan.cluster is not None else None
        schedule = plan_schedule(plan, assignment.costs(schedule, machine, plan.pipeline.axes, memory))
        # As many stages as before, but perhaps elsewhere, and with other numbers of micro-batches alive.
        assignment = assign_stages(plan, weighed, schedule, state, machine, reported)
    stages = {name: (k,) for name, k in assignment.stage_of.items()} | dict(assignment.replicated)
    ranks = {name: tuple(sorted({schedule.rank_of[k] for k in own})) for name, own in stages.items()}
    return Staging(pipeline_work(schedule, infos, stages), schedule, assignment, ranks)
