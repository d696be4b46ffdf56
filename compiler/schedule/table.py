"""Schedules that users write: a line for each rank, cells like `0F3` separated by commas.

    # two ranks, three micro-batches
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2

Empty cells (idle), blank lines and what follows a `#` mean nothing. The files that torch.distributed.pipelining writes
are read too: of its pairs that overlap, `(0F3;7B1)OVERLAP_F_B`, the actions are taken in turn, and its cells of
communication are left out, since planc derives its own.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from compiler.diagnostics import Diagnostics, Span
from compiler.schedule.actions import Action, Pipeline, parse_action, pipeline
from compiler.schedule.check import problems

_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
CODE = "E221"


@dataclass(frozen=True)
class _Row:
    """A rank's line: its actions, and the cell that each was written in."""

    span: Span
    actions: list[Action]
    cells: list[Span]


def parse_table(text: str, file: str, ranks: int, microbatches: int, diagnostics: Diagnostics) -> Pipeline | None:
    """The schedule in `text` for so many ranks and micro-batches, or None and what is wrong with it."""
    known = len(diagnostics.errors)
    rows = [
        _row(file, number, line.split("#")[0], diagnostics)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.split("#")[0].strip()
    ]
    if len(rows) != ranks:
        place = rows[min(len(rows), ranks + 1) - 1].span if rows else Span(file, 1, 1, 1, 2)
        count = f"{len(rows)} line{'s' * (len(rows) != 1)}"
        help = "one line for each rank"
        diagnostics.error(CODE, f"the schedule has {count}, the pipeline {ranks} ranks", place, help=help)
    placement = _placement(rows, diagnostics) if len(diagnostics.errors) == known else None
    if placement is None:
        return None
    schedule = pipeline(microbatches, placement, [row.actions for row in rows])
    for problem in problems(schedule):
        row = rows[problem.rank or 0]
        place = row.span if problem.index is None else row.cells[problem.index]
        diagnostics.error(CODE, problem.message, place, help=problem.help or ())
    return None if len(diagnostics.errors) > known else schedule


def _row(file: str, number: int, line: str, diagnostics: Diagnostics) -> _Row:
    """The actions of one line."""
    row = _Row(_span(file, number, line, 0, len(line)), [], [])
    start = 0
    for cell in line.split(","):
        end = start + len(cell)
        place, text = _span(file, number, line, start, end), cell.strip()
        start = end + 1
        if not text or _COMMUNICATION.fullmatch(text):
            continue
        pair = _PAIR.fullmatch(text)
        for part in pair[1].split(";") if pair else [text]:
            action = parse_action(part.strip())
            if action is None:
                fixed = parse_action(part.strip().upper())
                help = f"did you mean `{fixed}`?" if fixed else "stage, then F, B, I or W, then micro-batch: `0F3`"
                diagnostics.error(CODE, f"`{part.strip()}` is no action", place, help=help)
            else:
                row.actions.append(action)
                row.cells.append(place)
    return row


def _span(file: str, number: int, line: str, start: int, end: int) -> Span:
    """The text of a cell without the blanks around it."""
    text = line[start:end]
    left = start + len(text) - len(text.lstrip())
    return Span(file, number, left + 1, number, max(start + len(text.rstrip()), left + 1) + 1)


def _placement(rows: list[_Row], diagnostics: Diagnostics) -> tuple[int, ...] | None:
    """The rank of each stage: the one whose line names it most often."""
    named = Counter((action.stage, rank) for rank, row in enumerate(rows) for action in row.actions)
    found: dict[int, int] = {}
    for (stage, rank), _ in named.most_common():
        found.setdefault(stage, rank)
    gap = next((stage for stage in range(len(found)) if stage not in found), None)
    if gap is None and found:
        return tuple(found[stage] for stage in range(len(found)))
    row = rows[found[max(found)]] if found else rows[0]
    place = next((c for c, a in zip(row.cells, row.actions) if a.stage == max(found)), row.span)
    diagnostics.error(CODE, f"no rank has stage {gap or 0}", place, help="stages are numbered from 0, without gaps")
    return None
