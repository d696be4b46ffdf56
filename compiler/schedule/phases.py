"""A rank's list from a table of phases: `(3, "F0 B1")` does a forward of the rank's first stage and a backward of its
second, three times.

Micro-batches are counted for each stage and kind of action; `W` without a number is the oldest weight part left over
by an `I`. The papers' hand-made schedules are such tables.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from compiler.schedule.actions import Action


def play(phases: Iterable[tuple[int, str]], stages: Sequence[int]) -> list[Action]:
    """The actions of a rank that holds `stages`."""
    done: Counter[tuple[str, int]] = Counter()
    left: deque[Action] = deque()
    actions = []
    for times, pattern in phases:
        for step in pattern.split() * times:
            if step[0] == "W":
                of = next(a for a in left if step[1:] in ("", str(stages.index(a.stage))))
                left.remove(of)
                action = Action("W", of.stage, of.micro)
            else:
                stage = stages[int(step[1:])]
                counted = "F" if step[0] == "F" else "B"
                action = Action(step[0], stage, done[counted, stage])
                done[counted, stage] += 1
                if step[0] == "I":
                    left.append(action)
            actions.append(action)
    return actions
