"""What is drawn as a timeline: a schedule in units of time, and a step as the time reader has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from compiler.analysis.time import Span, StepTime
from compiler.report.asked import many
from compiler.report.numbers import duration
from compiler.report.timeline import KINDS, Box, Picture
from compiler.schedule.actions import Action, Pipeline
from compiler.schedule.costs import StageCosts
from compiler.schedule.timing import peak_activations, simulate


def schedule_picture(name: str, pipeline: Pipeline, costs: StageCosts | None = None) -> Picture:
    """A row for each rank; `costs` are in seconds, without them F, I and W take one unit of time and B two."""
    makespan = duration if costs is not None else "{:.6g}".format
    timing, alive = simulate(pipeline, costs), max(peak_activations(pipeline, costs).ranks)
    several = pipeline.stages > pipeline.ranks

    def box(action: Action, start: float, end: float) -> Box:
        stage = str(action.stage) if several else ""
        title = f"{KINDS[action.kind].meaning} of stage {action.stage}, micro-batch {action.micro}"
        label = f"{stage}{action.kind}{action.micro}"
        return Box(action.kind, label, title, start, end, action.stage >= pipeline.ranks)

    parts = pipeline.microbatches
    sizes = [many(pipeline.ranks, "rank"), f"{parts} micro-batch{'es' * (parts != 1)}"]
    if several:
        sizes.insert(1, f"{pipeline.stages} stages")
    return Picture(
        f"{name}: {', '.join(sizes)}",
        tuple(
            (f"rank {rank}", tuple(box(span.action, span.start, span.end) for span in spans))
            for rank, spans in enumerate(timing.spans)
        ),
        timing.makespan,
        f"makespan {makespan(timing.makespan)}, bubble {100 * timing.bubble:.3g} %, "
        f"at most {many(alive, 'activation')} alive on a rank",
    )


OPERATIONS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W", "step": "O"}


def step_picture(name: str, step: StepTime) -> Picture:
    """A row for each pipeline stage: what it computes for a micro-batch is one box, between them it waits."""
    return Picture(
        f"{name}: one step, estimated",
        tuple((f"stage {stage.stage}", tuple(_boxes(stage.spans))) for stage in step.stages),
        step.seconds,
        f"{duration(step.seconds)}, bubble {100 * step.bubble:.3g} %",
    )


def _boxes(spans: Sequence[Span]) -> Iterator[Box]:
    """Instructions of one kind and micro-batch that follow each other without a pause."""
    shown = [span for span in spans if span.instruction.op in OPERATIONS and span.end > span.start]
    paused = [0] * len(shown)
    for k in range(1, len(shown)):
        pause = shown[k].start - shown[k - 1].end > 1e-12 * shown[k].start
        paused[k] = paused[k - 1] + pause
    keys = [(OPERATIONS[s.instruction.op], s.instruction.micro, pauses) for s, pauses in zip(shown, paused)]
    for (kind, micro, _), members in groupby(range(len(shown)), key=keys.__getitem__):
        group = [shown[k] for k in members]
        names = [group[0].instruction.target, group[-1].instruction.target]
        what = names[0] if len(group) == 1 else " … ".join(names)
        of = "" if micro is None else f", micro-batch {micro}"
        label = kind if micro is None else f"{kind}{micro}"
        yield Box(kind, label, f"{KINDS[kind].meaning} of {what}{of}", group[0].start, group[-1].end)
