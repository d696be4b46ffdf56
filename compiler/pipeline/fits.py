"""Does every pipeline rank have the memory that its stages need? A prediction, so a warning at most."""

from __future__ import annotations

from collections.abc import Iterator

from compiler.analysis.machine import machine
from compiler.diagnostics import Diagnostic, declare_codes
from compiler.dsl.plan import Plan
from compiler.dsl.units import show_size
from compiler.layout.placement import Mesh
from compiler.pipeline.staging import Staging
from compiler.schedule.timing import peak_activations

declare_codes({"W230": "a pipeline rank that may need more memory than its device has"})


def memory_warnings(plan: Plan, staging: Staging, mesh: Mesh) -> Iterator[Diagnostic]:
    """A warning about the rank that exceeds its device's memory most, if the plan names the device."""
    strategy, assignment, schedule = plan.pipeline, staging.assignment, staging.schedule
    if strategy is None or plan.cluster is None or assignment is None or schedule is None:
        return
    resident = assignment.resident(schedule)
    peaks = peak_activations(schedule, assignment.costs(schedule, machine(plan, mesh), strategy.axes)).bytes
    need = [a + b for a, b in zip(resident, peaks)]
    worst = max(range(schedule.ranks), key=need.__getitem__)
    memory = plan.cluster.hardware.memory
    if need[worst] > memory:
        yield Diagnostic(
            "warning",
            "W230",
            f"rank {worst} of the pipeline needs about {show_size(need[worst])}, its device has {show_size(memory)}",
            strategy.span,
            label=f"{show_size(peaks[worst])} of activations, {show_size(resident[worst])} of parameters, their state and work",
            help=("use more stages, more micro-batches of fewer rows, `recompute`, or `zero`",),
        )
