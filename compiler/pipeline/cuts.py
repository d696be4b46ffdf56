"""Cutting a sequence into runs: exact dynamic programming over contiguous cuts.

Of all ways to cut items 0 … n-1 into `stages` runs, none of them empty, the best has, in this order,

    1. no stage that needs more than `limit` bytes; if that cannot be, the least need that can,
    2. the shortest time of the slowest stage: in a pipeline it sets the pace of all,
    3. the least price: the fewest bytes sent between stages, then the most even times, then the least memory.

The first two minimise a maximum and the last a sum. Each is one pass over all (stage, first, end), O(stages n²).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

EVEN = 1_000_000
"""Parts into which a stage's squared share of the slowest stage's time is divided: rounding shall not decide."""


class Run(Protocol):
    """What a run of items costs: seconds, and bytes that it exchanges with earlier runs."""

    @property
    def seconds(self) -> float: ...

    @property
    def exchanged(self) -> int: ...


@dataclass(frozen=True)
class Problem:
    """`run(first, end)` of items first … end-1, and the bytes that `memory(stage, first, end)` a stage would need."""

    items: int
    stages: int
    run: Callable[[int, int], Run]
    memory: Callable[[int, int, int], int]
    limit: int | None = None


def best_cuts(problem: Problem) -> tuple[int, ...]:
    """The first item of each stage."""
    bound = float("inf") if problem.limit is None else max(problem.limit, bottleneck(problem, problem.memory))

    def fits(stage: int, first: int, end: int) -> bool:
        return problem.limit is None or problem.memory(stage, first, end) <= bound

    slowest = bottleneck(
        problem, lambda s, first, end: problem.run(first, end).seconds if fits(s, first, end) else float("inf")
    )

    def price(stage: int, first: int, end: int) -> tuple[int, ...] | None:
        run = problem.run(first, end)
        if not fits(stage, first, end) or run.seconds > slowest * (1 + 1e-9):
            return None
        share = run.seconds / slowest if slowest else 0.0
        return run.exchanged, round(EVEN * share**2), problem.memory(stage, first, end)

    return cheapest(problem, price)


def bottleneck(problem: Problem, cost: Callable[[int, int, int], float]) -> float:
    """The smallest maximum of `cost(stage, first, end)` over the stages of a cut."""
    n, stages = problem.items, problem.stages
    best = [float("inf")] * (n + 1)  # of the stages so far, if they end there
    best[0] = 0.0
    for stage in range(stages):
        following = [float("inf")] * (n + 1)
        for end in range(stage + 1, n - (stages - stage - 1) + 1):
            for first in range(end - 1, stage - 1, -1):
                if best[first] < following[end]:
                    following[end] = min(following[end], max(best[first], cost(stage, first, end)))
        best = following
    return best[n]


def cheapest(problem: Problem, price: Callable[[int, int, int], tuple[int, ...] | None]) -> tuple[int, ...]:
    """The cut with the smallest sum of `price(stage, first, end)`, item by item; None is not allowed."""
    n, stages = problem.items, problem.stages
    best: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {0: ((), ())}  # end → (price, cut)
    for stage in range(stages):
        following: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for first, (paid, cut) in best.items():
            for end in range(first + 1, n - (stages - stage - 1) + 1):
                more = price(stage, first, end)
                if more is None:
                    continue
                total = tuple(a + b for a, b in zip(paid or (0,) * len(more), more))
                if end not in following or (total, (*cut, first)) < following[end]:
                    following[end] = total, (*cut, first)
        best = following
    return best[n][1]
