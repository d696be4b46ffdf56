"""A schedule as a picture: rows are ranks, columns are time; for a terminal, and as SVG."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import jinja2
from rich.text import Text

from compiler.schedule.actions import Action, Pipeline
from compiler.schedule.costs import StageCosts
from compiler.schedule.timing import Peaks, Timing, peak_activations, simulate

STYLES = {"F": "black on bright_blue", "B": "black on green", "I": "black on cyan", "W": "black on yellow"}
COLORS = {"F": "#5b8ff9", "B": "#5ad8a6", "I": "#6dc8ec", "W": "#f6bd16"}
MEANING = {"F": "forward", "B": "backward", "I": "input-gradient part", "W": "weight-gradient part"}


@dataclass(frozen=True)
class Drawing:
    """A schedule, when it does what, and the most that it keeps alive."""

    title: str
    pipeline: Pipeline
    timing: Timing
    peaks: Peaks

    def label(self, action: Action) -> str:
        """`F3`, with the stage before it where ranks have several."""
        stage = str(action.stage) if self.pipeline.stages > self.pipeline.ranks else ""
        return f"{stage}{action.kind}{action.micro}"

    @property
    def kinds(self) -> list[str]:
        """The kinds of actions that occur."""
        found = {action.kind for actions in self.pipeline.actions for action in actions}
        return [kind for kind in MEANING if kind in found]

    @property
    def figures(self) -> dict[str, object]:
        """For machines: times, and what is alive at most on each rank."""
        timing = self.timing
        return {
            "makespan": timing.makespan,
            "bubble": timing.bubble,
            "idle": list(timing.idle),
            "alive": list(self.peaks.ranks),
        }

    @property
    def summary(self) -> str:
        """`makespan 33, bubble 37.5 %, at most 4 activations alive on a rank`."""
        alive = max(self.peaks.ranks)
        return (
            f"makespan {self.timing.makespan:.6g}, bubble {100 * self.timing.bubble:.3g} %, "
            f"at most {alive} activation{'s' * (alive != 1)} alive on a rank"
        )


def draw(name: str, pipeline: Pipeline, costs: StageCosts | None = None) -> Drawing:
    """The picture of a schedule; without `costs` F, I and W take one unit of time and B two."""
    several = f", {pipeline.stages} stages" if pipeline.stages > pipeline.ranks else ""
    title = f"{name}: {pipeline.ranks} ranks{several}, {pipeline.microbatches} micro-batches"
    return Drawing(title, pipeline, simulate(pipeline, costs), peak_activations(pipeline, costs))


def to_text(drawing: Drawing, width: int = 120) -> Text:
    """For a terminal of `width` columns; a longer time is folded. `·` is a rank that waits."""
    rows = [_row(drawing, rank) for rank in range(drawing.pipeline.ranks)]
    longest = max(map(len, rows))
    heads = [f"rank {rank}" for rank in range(len(rows))]
    margin = max(map(len, heads)) + 2
    fold = max(width - margin, 20)
    text = Text(drawing.title + "\n")
    for start in range(0, longest, fold):
        if start:
            text.append("\n")
        for head, row in zip(heads, rows):
            piece = row[start : start + fold]
            piece.rstrip()
            text.append(head.ljust(margin), "dim").append_text(piece).append("\n")
    return text.append(drawing.summary + "\n")


def _row(drawing: Drawing, rank: int) -> Text:
    """One rank: an action is its label, filled up to its length; three in four hold their label."""
    spans = drawing.timing.spans
    lengths = sorted(span.end - span.start for row in spans for span in row if span.end > span.start)
    longest = max(len(drawing.label(span.action)) for row in spans for span in row)
    unit = lengths[len(lengths) // 4] / (longest + 1) if lengths else 1.0
    row = Text()
    for span in spans[rank]:
        start, end = round(span.start / unit), round(span.end / unit)
        row.append("·" * (start - len(row)), "dim")
        if end > len(row):
            room = end - len(row)
            row.append(drawing.label(span.action)[: room - 1].ljust(room - 1, "─"), STYLES[span.action.kind]).append(
                " "
            )
    return row.append("·" * (round(drawing.timing.makespan / unit) - len(row)), "dim")


@cache
def _template() -> jinja2.Template:
    text = (files("compiler.report") / "templates" / "timeline.svg.j2").read_text()
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)


def to_svg(drawing: Drawing) -> str:
    """A picture that any browser shows; hovering over an action says what it is and when."""
    return _template().render(drawing=drawing, colors=COLORS, meaning=MEANING)
