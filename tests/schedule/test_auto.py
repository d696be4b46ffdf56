"""`auto` is complete, keeps the limit, and is never longer than a named schedule that does."""

import random

import pytest

from compiler.schedule.actions import ScheduleError
from compiler.schedule.auto import lower_bound
from compiler.schedule.check import problems
from compiler.schedule.costs import StageCosts, equal_costs
from compiler.schedule.greedy import Policy, greedy
from compiler.schedule.named import NAMED, make_schedule
from compiler.schedule.timing import peak_activations, simulate


def rivals(ranks: int, microbatches: int, virtual: int):
    for name, named in NAMED.items():
        try:
            if named.virtual in (None, virtual):
                yield make_schedule(name, ranks, microbatches, virtual)
        except ScheduleError:
            pass


def random_costs(draw: random.Random, ranks: int, virtual: int) -> StageCosts:
    stages = ranks * virtual
    forward = tuple(draw.uniform(0.5, 1.5) for _ in range(stages))
    input, weight = (tuple(f * draw.uniform(0.5, 1.5) for f in forward) for _ in range(2))
    activation = tuple(draw.randint(1, 9) for _ in range(stages))
    limit = draw.choice((None, draw.randint(9 * virtual, 9 * stages)))
    return StageCosts(forward, input, weight, activation, limit, draw.choice((0.0, 0.3)))


@pytest.mark.parametrize("seed", range(12))
def test_as_good_as_every_named_schedule(seed):
    draw = random.Random(seed)
    ranks, microbatches, virtual = draw.randint(1, 4), draw.randint(1, 8), draw.choice((1, 2, 2, 3))
    costs = random_costs(draw, ranks, virtual)
    found = make_schedule("auto", ranks, microbatches, virtual, costs)
    assert problems(found) == []
    limit = costs.limit or float("inf")
    assert max(peak_activations(found, costs).bytes) <= limit
    makespan = simulate(found, costs).makespan
    assert makespan >= lower_bound(found, costs) * (1 - 1e-9)
    for rival in rivals(ranks, microbatches, virtual):
        if max(peak_activations(rival, costs).bytes) <= limit:
            assert makespan <= simulate(rival, costs).makespan * (1 + 1e-9)


@pytest.mark.parametrize("virtual", [1, 2])
def test_better_than_all_where_stages_differ(virtual):
    costs = StageCosts((2.0, 1.0, 1.0, 3.0), (2.0, 1.0, 1.0, 3.0), (1.0, 1.0, 1.0, 1.0), (1, 1, 1, 1))
    ranks = 4 // virtual
    makespan = simulate(make_schedule("auto", ranks, 8, virtual, costs), costs).makespan
    assert makespan < min(simulate(rival, costs).makespan for rival in rivals(ranks, 8, virtual))


def test_as_short_as_can_be_with_equal_stages():
    found = make_schedule("auto", 4, 8)
    assert simulate(found).makespan == lower_bound(found, equal_costs(4)) == 27
    assert max(peak_activations(found).ranks) == 4


def test_a_split_backward_is_for_something():
    """On one rank nothing waits: whole backwards, one micro-batch alive at a time."""
    assert str(make_schedule("auto", 1, 3)) == "0F0,0B0,0F1,0B1,0F2,0B2\n"


def test_the_least_memory_possible():
    found = make_schedule("auto", 3, 5, 2, equal_costs(6, limit=2))
    assert max(peak_activations(found).ranks) == 2


def test_a_limit_below_one_micro_batch_asks_for_the_least_memory():
    found = make_schedule("auto", 3, 5, 2, equal_costs(6, limit=1))
    assert found == make_schedule("auto", 3, 5, 2, equal_costs(6, limit=2))


@pytest.mark.parametrize("seed", range(60))
def test_the_list_scheduler_never_stands_still(seed):
    """Whatever the placement, the costs, the limit and the policy."""
    draw = random.Random(seed)
    ranks, virtual, microbatches = draw.randint(1, 5), draw.randint(1, 3), draw.randint(1, 9)
    rank_of = [*range(ranks)] + [draw.randrange(ranks) for _ in range(ranks * (virtual - 1))]
    draw.shuffle(rank_of)
    costs = random_costs(draw, ranks, virtual)
    need = max(sum(b for b, r in zip(costs.activation, rank_of) if r == rank) for rank in range(ranks))
    costs = StageCosts(costs.forward, costs.input, costs.weight, costs.activation, need + draw.randint(0, 20), 0.2)
    policy = Policy(draw.uniform(0.5, 6), draw.random() < 0.5, draw.random() < 0.5, draw.choice((0.0, 0.5, 1.0)))
    found = greedy(microbatches, tuple(rank_of), costs, policy)
    assert problems(found) == []
    assert max(peak_activations(found, costs).bytes) <= costs.limit
