"""What became of `pipeline over pp`: stages, messages, schedule and split."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from compiler.analysis.machine import machine
from compiler.dsl.units import show_size
from compiler.schedule.timing import simulate

if TYPE_CHECKING:
    from compiler.driver import Compilation


def asked_pipeline(c: Compilation) -> Iterator[tuple[str, str, str]]:
    """(request, outcome, detail) of each part of the statement."""
    strategy, assignment, schedule = c.plan.pipeline, c.linked.staging.assignment, c.linked.staging.schedule
    if strategy is None or assignment is None or schedule is None:
        return
    sent = c.program.messages
    size = show_size(sum(math.prod(message.shape) * getattr(torch, message.dtype).itemsize for message in sent))
    passed = f"for each micro-batch {len(sent)} values pass between them, {size}"
    yield (
        f"pipeline over {', '.join(strategy.axes)}",
        "applied",
        f"{schedule.stages} stages on {schedule.ranks} ranks; {passed}",
    )
    if "microbatches" in strategy.given:
        outcome = "applied" if schedule.microbatches > 1 else "no effect"
        effect = "they fill the stages" if c.plan.mode == "forward" else "gradients accumulate over them"
        yield f"microbatches = {schedule.microbatches}", outcome, effect
    if "schedule" in strategy.given:
        timing = simulate(schedule, assignment.costs(schedule, machine(c.plan, c.mesh), strategy.axes))
        yield f"schedule = {strategy.schedule}", "applied", f"bubble {timing.bubble:.1%}, by what the stages cost"
    if strategy.scatter_gather:
        sliced = sum(bool(message.over) for message in sent)
        yield "scatter_gather = on", "applied" if sliced else "no effect", f"{sliced} of {len(sent)} values are sent in slices"
    if strategy.times is not None:
        yield f"times = {strategy.times}", "applied", "stages and schedules are weighed by measured times"
    if "virtual" in strategy.given:
        yield f"virtual = {strategy.virtual}", "applied", f"{schedule.stages} stages in turn on {schedule.ranks} ranks"
    if strategy.split_before:
        points = ", ".join(f'"{pattern.text}"' for pattern in strategy.split_before)
        begins = ", ".join(f"`{stage.calls[0]}`" for stage in assignment.stages[1:])
        yield f"split before {points}", "applied", f"stages begin at {begins}"
    elif "split" in strategy.given:
        seconds = [stage.run.seconds for stage in assignment.stages]
        mean = sum(seconds) / len(seconds)
        yield (
            f"split = {strategy.split}",
            "applied",
            f"the slowest stage takes {max(seconds) / mean - 1:.1%} longer than the mean",
        )
