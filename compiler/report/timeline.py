"""Pictures of time: rows are ranks or stages, columns are time; for a terminal, and as SVG."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import jinja2
from rich.text import Text

COLUMNS = 1_000
"""At most so many in all."""


@dataclass(frozen=True)
class Kind:
    """What is done in a box: how it is called, and its colours on a terminal and in a browser."""

    meaning: str
    style: str
    color: str


KINDS: dict[str, Kind] = {
    "F": Kind("forward", "black on bright_blue", "#5b8ff9"),
    "B": Kind("backward", "black on green", "#5ad8a6"),
    "I": Kind("input-gradient part", "black on cyan", "#6dc8ec"),
    "W": Kind("weight-gradient part", "black on yellow", "#f6bd16"),
    "O": Kind("optimizer", "black on magenta", "#b37feb"),
}


@dataclass(frozen=True)
class Box:
    """Something that is done from `start` to `end`; `kind` is one of `KINDS`, `title` says it in full."""

    kind: str
    label: str
    title: str
    start: float
    end: float
    faded: bool = False


@dataclass(frozen=True)
class Picture:
    """`rows` have a head and their boxes in order; `end` is when all are done."""

    title: str
    rows: tuple[tuple[str, tuple[Box, ...]], ...]
    end: float
    summary: str

    @property
    def kinds(self) -> dict[str, Kind]:
        """Those that occur."""
        found = {box.kind for _, boxes in self.rows for box in boxes}
        return {name: kind for name, kind in KINDS.items() if name in found}


def to_text(picture: Picture, width: int = 120) -> Text:
    """For a terminal of `width` columns; a longer time is folded. `·` is a rank that waits."""
    unit = _unit(picture)
    rows = [_row(boxes, unit, picture.end) for _, boxes in picture.rows]
    margin = max(len(head) for head, _ in picture.rows) + 2
    fold = max(width - margin, 20)
    text = Text(picture.title + "\n")
    for start in range(0, max(map(len, rows)), fold):
        if start:
            text.append("\n")
        for (head, _), row in zip(picture.rows, rows):
            piece = row[start : start + fold]
            piece.rstrip()
            text.append(head.ljust(margin), "dim").append_text(piece).append("\n")
    return text.append(picture.summary + "\n")


def _unit(picture: Picture) -> float:
    """The time of one column: three in four boxes hold their label, if the columns are not too many."""
    boxes = [box for _, boxes in picture.rows for box in boxes if box.end > box.start]
    lengths = sorted(box.end - box.start for box in boxes)
    longest = max((len(box.label) for box in boxes), default=0)
    return max(lengths[len(lengths) // 4] / (longest + 1), picture.end / COLUMNS) if lengths else 1.0


def _row(boxes: tuple[Box, ...], unit: float, end: float) -> Text:
    """A box is its label, filled up to its length."""
    row = Text()
    for box in boxes:
        first, behind = round(box.start / unit), round(box.end / unit)
        row.append("·" * (first - len(row)), "dim")
        if behind > len(row):
            room = behind - len(row) - 1
            row.append(box.label[:room].ljust(room, "─"), KINDS[box.kind].style).append(" ")
    return row.append("·" * (round(end / unit) - len(row)), "dim")


@cache
def _template() -> jinja2.Template:
    text = (files("compiler.report") / "templates" / "timeline.svg.j2").read_text()
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)


def to_svg(picture: Picture) -> str:
    """A picture that any browser shows; hovering over a box says what it is and when."""
    return _template().render(picture=picture, kinds=KINDS)
