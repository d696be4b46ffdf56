"""Ten thousand random schedules: complete, possible, never longer than one rank after the other."""

import random

import pytest

from compiler.schedule.actions import ScheduleError
from compiler.schedule.check import problems
from compiler.schedule.costs import StageCosts
from compiler.schedule.named import NAMED, make_schedule
from compiler.schedule.timing import peak_activations, simulate


def random_costs(draw: random.Random, stages: int) -> StageCosts:
    seconds = [tuple(draw.choice((0.0, draw.uniform(0.1, 5))) for _ in range(stages)) for _ in range(3)]
    return StageCosts(*seconds, (1,) * stages, None, draw.choice((0.0, draw.uniform(0, 2))))


@pytest.mark.parametrize("name", NAMED)
def test_random(name):
    draw = random.Random(name)
    count = 10_000 // len(NAMED) + 1
    while count:
        ranks, microbatches = draw.randint(1, 6), draw.randint(1, 14)
        virtual = draw.randint(2, 4) if name == "interleaved" else None
        try:
            schedule = make_schedule(name, ranks, microbatches, virtual)
        except ScheduleError:
            assert name == "dualpipe_v" and microbatches < 2 * ranks
            continue
        count -= 1
        assert not problems(schedule)
        costs = random_costs(draw, schedule.stages)
        timing = simulate(schedule, costs)
        work = sum(timing.busy)
        assert max(timing.busy) <= timing.makespan <= work + 2 * schedule.stages * microbatches * costs.transfer + 1e-9
        assert max(peak_activations(schedule).stages) <= microbatches
