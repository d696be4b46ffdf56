"""Cuts are the best there are: compared with all of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from compiler.pipeline.cuts import EVEN, Problem, best_cuts


@dataclass(frozen=True)
class Sum:
    seconds: float
    exchanged: int


def made_up(seed: int, items: int, stages: int) -> Problem:
    """Random items; what passes over a border is random too; the first stages hold more micro-batches."""
    chance = random.Random(seed)
    seconds = [chance.choice([1, 1, 2, 3, 5, 8]) / 10 for _ in range(items)]
    size = [chance.randint(1, 9) for _ in range(items)]
    border = [chance.randint(0, 3) for _ in range(items)]

    def run(first: int, end: int) -> Sum:
        return Sum(sum(seconds[first:end]), border[first])

    def memory(stage: int, first: int, end: int) -> int:
        return (stages - stage) * sum(size[first:end])

    return Problem(items, stages, run, memory, chance.choice([None, 5, 20, 40, 80]))


def merit(problem: Problem, firsts: tuple[int, ...]) -> tuple[float, ...]:
    runs = [*zip(firsts, (*firsts[1:], problem.items))]
    slowest = max(problem.run(*run).seconds for run in runs)
    need = [problem.memory(stage, *run) for stage, run in enumerate(runs)]
    over = 0 if problem.limit is None else max(0, max(need) - problem.limit)
    price = (
        sum(problem.run(*run).exchanged for run in runs),
        sum(round(EVEN * (problem.run(*run).seconds / slowest) ** 2) for run in runs),
        sum(need),
    )
    return over, round(slowest, 9), *price


@pytest.mark.parametrize("seed", range(200))
def test_the_best_of_all(seed: int) -> None:
    stages = 1 + seed % 5
    problem = made_up(seed, stages + seed % 7, stages)
    everything = [(0, *rest) for rest in itertools.combinations(range(1, problem.items), stages - 1)]
    assert merit(problem, best_cuts(problem)) == min(merit(problem, firsts) for firsts in everything)


def test_equal_items() -> None:
    """Nothing but equal layers: as even as can be, and the short stages in front, where most micro-batches are alive."""
    problem = Problem(
        10, 4, lambda first, end: Sum((end - first) / 3, 7 * (first > 0)), lambda s, first, end: (4 - s) * (end - first)
    )
    assert best_cuts(problem) == (0, 2, 4, 7)
