"""The geometry of the report's pictures: memory over time, and what each stage does when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compiler.analysis.dry_run import DryRun
from compiler.analysis.memory import Memory
from compiler.analysis.time import Span, StageTime, StepTime

WIDTH = 1000
POINTS = 1200
"""Instructions that a picture of memory shows at most; of neighbours, those with the highest peaks."""

COLORS: dict[str, str] = {
    "parameters": "#4c72b0",
    "gradients": "#55a868",
    "optimizer": "#8172b2",
    "buffers": "#937860",
    "batch": "#8c8c8c",
    "activations": "#dd8452",
    "communication": "#c44e52",
    "temporaries": "#da8bc3",
    "other": "#ccb974",
}
"""Of the categories of memory, from the bottom of the picture upwards."""

ACTIONS: dict[str, str] = {
    "forward": "#5b8ff9",
    "backward": "#5ad8a6",
    "backward_input": "#6dc8ec",
    "backward_weight": "#f6bd16",
    "wait": "#e8684a",
    "step": "#9270ca",
}
"""Of the instructions that take time."""

OTHER_ACTION = "#c0c0c0"


@dataclass(frozen=True)
class Area:
    """One category's share of the memory, as an SVG path."""

    name: str
    color: str
    path: str


@dataclass(frozen=True)
class MemoryChart:
    """Stacked areas over the time of the step, and a line for the peaks inside instructions. `limit`: where the
    device's memory ends, if that is in the picture; `top`: the bytes at its upper edge."""

    areas: tuple[Area, ...]
    peaks: str
    top: int
    limit: float | None
    height: int


def memory_chart(run: DryRun, memory: Memory, time: StageTime, available: int, height: int = 260) -> MemoryChart:
    """What is alive before each instruction, by category, and the most inside it."""
    kept = thinned([moment.peak for moment in memory.moments])
    top = round(memory.peak.bytes * 1.08) or 1
    seconds = time.seconds or 1.0
    at = [WIDTH * time.spans[k].start / seconds for k in kept]
    lower = [0.0] * len(kept)
    areas = []
    for name, color in COLORS.items():
        sizes = [run.steps[k].before.get(name, 0) for k in kept]
        if not any(sizes):
            continue
        upper = [base + size for base, size in zip(lower, sizes)]
        there = points(zip(at, upper), top, height)
        back = points(zip(reversed(at), reversed(lower)), top, height)
        areas.append(Area(name, color, f"M{there} L{back} Z"))
        lower = upper
    peaks = "M" + points(((x, memory.moments[k].peak) for x, k in zip(at, kept)), top, height)
    limit = height * (1 - available / top) if available < top else None
    return MemoryChart(tuple(areas), peaks, top, limit, height)


def points(pairs: Iterator[tuple[float, float]], top: int, height: int) -> str:
    return " ".join(f"{x:.1f},{height * (1 - value / top):.1f}" for x, value in pairs)


def thinned(values: Sequence[int]) -> list[int]:
    """The indices of at most `POINTS` values, the highest of each group of neighbours."""
    group = -(-len(values) // POINTS)
    return [max(range(k, min(k + group, len(values))), key=values.__getitem__) for k in range(0, len(values), group)]


@dataclass(frozen=True)
class Bar:
    """An instruction, or neighbours of one kind, in a stage's row."""

    x: float
    width: float
    color: str
    text: str


def bars(stage: StageTime, seconds: float) -> list[Bar]:
    """A stage's row; what would be too thin to see is drawn together with its like beside it."""
    found: list[tuple[str, Span, Span]] = []
    for span in stage.spans:
        op = span.instruction.op
        if span.end == span.start:
            continue
        thin = WIDTH * (span.end - span.start) / seconds < 1
        if found and thin and found[-1][0] == op:
            found[-1] = (op, found[-1][1], span)
        else:
            found.append((op, span, span))
    scale = WIDTH / (seconds or 1.0)
    return [
        Bar(
            first.start * scale,
            max(0.2, (last.end - first.start) * scale),
            ACTIONS.get(op, OTHER_ACTION),
            f"{first.instruction}" + (f" … {last.instruction}" if last is not first else ""),
        )
        for op, first, last in found
    ]


def rows(time: StepTime) -> list[list[Bar]]:
    """One row for each stage."""
    return [bars(stage, time.seconds) for stage in time.stages]
