"""Local search on a schedule: change the order of what the makespan hangs on.

Actions that follow each other on a rank without a pause, on the longest chain of actions that wait for each other, are
a *block*. No change outside of blocks can make the schedule shorter, so only their actions are moved, to their block's
begin or end or past their neighbour (the neighbourhoods of job-shop scheduling, Nowicki & Smutnicki 1996). Equal
schedules are accepted too, so that the search leaves plateaus.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from compiler.schedule.actions import Action, Pipeline
from compiler.schedule.costs import StageCosts
from compiler.schedule.timing import Deadlock, Timing, simulate

Move = tuple[int, int, int]  # rank, from, to


def improve(
    pipeline: Pipeline, costs: StageCosts, allowed: Callable[[Pipeline], bool], bound: float, tries: int
) -> Pipeline:
    """A schedule at least as short, after simulating at most `tries` others; it stops early at `bound` seconds.

    `allowed` says whether a changed schedule may be taken (its memory).
    """
    draw = random.Random(0)
    best = current = pipeline
    timing = simulate(pipeline, costs)
    shortest = timing.makespan
    seen = {pipeline.actions}
    while tries > 0 and shortest > bound * (1 + 1e-9):
        moves = list(_moves(timing))
        draw.shuffle(moves)
        for move in moves:
            if tries <= 0:
                break
            changed = _moved(current, move)
            if changed is None or changed.actions in seen or not allowed(changed):
                continue
            tries -= 1
            seen.add(changed.actions)
            try:
                found = simulate(changed, costs)
            except Deadlock:
                continue
            if found.makespan <= timing.makespan * (1 + 1e-12):
                current, timing = changed, found
                if found.makespan < shortest * (1 - 1e-12):
                    best, shortest = changed, found.makespan
                break
        else:
            break
    return best


def _moves(timing: Timing) -> Iterator[Move]:
    """Moves of the actions of critical blocks."""
    for rank, first, last in _blocks(timing):
        for k in range(first, last):
            yield rank, k, k + 1
            yield rank, k, last
        for k in range(first + 2, last + 1):
            yield rank, k, first


def _blocks(timing: Timing) -> Iterator[tuple[int, int, int]]:
    """The critical path from its end, as (rank, first, last) of the actions in a row on a rank."""
    place = {span.action: (rank, k) for rank, spans in enumerate(timing.spans) for k, span in enumerate(spans)}
    ends = [spans[-1].end for spans in timing.spans]
    rank = ends.index(max(ends))
    k = len(timing.spans[rank]) - 1
    while True:
        spans, last = timing.spans[rank], k
        while k and spans[k].start - spans[k - 1].end <= 1e-12 * spans[k].start:
            k -= 1
        if last > k:
            yield rank, k, last
        before = _cause(spans[k].action, place)
        if before is None:
            return
        rank, k = before


def _cause(action: Action, place: dict[Action, tuple[int, int]]) -> tuple[int, int] | None:
    """Where that is what the first action of a block waited for; None for one that waits for no other rank."""
    if action.kind == "W":
        return None
    needs = [Action("F", action.stage - 1, action.micro)] if action.kind == "F" else [
        Action(kind, action.stage + 1, action.micro) for kind in "BI"
    ]  # fmt: skip
    return next((place[need] for need in needs if need in place), None)


def _moved(pipeline: Pipeline, move: Move) -> Pipeline | None:
    """The schedule after a move; None if an action would pass one of its own stage and micro-batch."""
    rank, source, target = move
    actions = list(pipeline.actions[rank])
    action = actions.pop(source)
    passed = actions[min(source, target) : max(source, target)]
    if any(other.stage == action.stage and other.micro == action.micro for other in passed):
        return None
    actions.insert(target, action)
    return replace(pipeline, actions=(*pipeline.actions[:rank], tuple(actions), *pipeline.actions[rank + 1 :]))
