"""Bad plans in files, and the completion of fragments to whole plans.

A file in bad/ holds cases like

    === what the case shows
    expect E043 at 1:30 "0 is out of range"
    data over dp { microbatches = 0 }

All errors of the case are listed, in order. A fragment is completed with the statements that every
plan needs and that it lacks, behind it, so that its own lines count from 1; `=== raw …` is not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PRELUDE = {
    "model": 'model "m:M"',
    "input": "input x : float32[4]",
    "mesh": "mesh pp=2 dp=2 cp=2 tp=2",
}


@dataclass(frozen=True)
class Expected:
    """One expected diagnostic."""

    code: str
    line: int
    column: int
    text: str


@dataclass(frozen=True)
class Case:
    """One bad plan and all that must be said about it."""

    title: str
    text: str
    expected: tuple[Expected, ...]
    sets: tuple[str, ...]
    file: Path


def complete(fragment: str, words: tuple[str, ...] = tuple(PRELUDE)) -> str:
    """The fragment with the statements that it lacks."""
    lacking = [PRELUDE[w] for w in words if not re.search(rf"^\s*{w}\b", fragment, re.M)]
    end = "" if not fragment or fragment.endswith("\n") else "\n"
    return fragment + end + "".join(f"{line}\n" for line in lacking)


_EXPECT = re.compile(r'expect (\w\d+) at (\d+):(\d+) "(.*)"')


def cases(file: Path) -> list[Case]:
    """The cases of one file."""
    found = []
    for part in re.split(r"^=== ", file.read_text("utf-8"), flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        expected, sets = [], []
        while body.startswith(("expect ", "set ")):
            line, _, body = body.partition("\n")
            if line.startswith("set "):
                sets.append(line[4:])
            else:
                code, row, column, text = _EXPECT.fullmatch(line).groups()
                expected.append(Expected(code, int(row), int(column), text))
        body = body.rstrip("\n") + "\n"
        text = body if title.startswith("raw ") else complete(body)
        found.append(Case(title, text, tuple(expected), tuple(sets), file))
    return found


def all_cases() -> list[Case]:
    """Every bad plan."""
    return [case for file in sorted((HERE / "bad").glob("*.plans")) for case in cases(file)]
