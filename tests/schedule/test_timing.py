"""Makespans and peaks against the papers' closed formulas."""

import pytest

from compiler.schedule.actions import ScheduleError, loop_placement, parse_action, pipeline
from compiler.schedule.costs import equal_costs
from compiler.schedule.named import make_schedule
from compiler.schedule.timing import Deadlock, peak_activations, simulate

SIZES = [(2, 4), (4, 8), (4, 12), (8, 32), (3, 9)]


@pytest.mark.parametrize("ranks, microbatches", SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble(name, ranks, microbatches):
    costs = equal_costs(ranks, forward=3.0, input=4.0, weight=2.0)
    timing = simulate(make_schedule(name, ranks, microbatches), costs)
    assert timing.bubble == pytest.approx((ranks - 1) / microbatches)


@pytest.mark.parametrize("ranks, microbatches", SIZES)
@pytest.mark.parametrize("virtual", [2, 3, 4])
def test_interleaved_bubble(ranks, microbatches, virtual):
    """Narayanan et al. 2021: (p-1)/(v·m), where m divides by p."""
    timing = simulate(make_schedule("interleaved", ranks, microbatches, virtual))
    assert timing.bubble == pytest.approx((ranks - 1) / (virtual * microbatches))


@pytest.mark.parametrize("ranks, microbatches", SIZES)
@pytest.mark.parametrize("forward, input, weight", [(1.0, 1.0, 1.0), (4.0, 4.0, 3.0), (3.0, 4.0, 3.0)])
def test_zb_h1_bubble(ranks, microbatches, forward, input, weight):
    """Qi et al. 2024, table 1: (p-1)(T_F + T_B - T_W) with their T_B our input part."""
    timing = simulate(make_schedule("zb_h1", ranks, microbatches), equal_costs(ranks, forward, input, weight))
    assert max(timing.idle) == pytest.approx((ranks - 1) * (forward + input - weight), rel=0.01)


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 8), (4, 13), (8, 32)])
def test_zb_v_has_no_bubble(ranks, microbatches):
    timing = simulate(make_schedule("zb_v", ranks, microbatches))
    for spans, busy in zip(timing.spans, timing.busy):
        assert spans[-1].end - spans[0].start == busy


@pytest.mark.parametrize("ranks, microbatches", SIZES)
def test_peaks(ranks, microbatches):
    def peaks(name):
        return peak_activations(make_schedule(name, ranks, microbatches)).ranks

    assert peaks("gpipe") == (microbatches,) * ranks
    assert peaks("1f1b") == tuple(min(microbatches, ranks - rank) for rank in range(ranks))
    assert peaks("zb_h1") == (min(microbatches, ranks),) * ranks
    assert peaks("zb_v") == (2 * ranks,) * ranks
    if microbatches >= 2 * ranks:
        assert peaks("dualpipe_v") == (2 * ranks + 1,) * ranks


@pytest.mark.parametrize("virtual", [2, 4])
def test_interleaved_peaks(virtual):
    ranks = 4
    found = peak_activations(make_schedule("interleaved", ranks, 16, virtual)).ranks
    assert found == tuple((virtual - 1) * ranks + 2 * (ranks - rank - 1) + 1 for rank in range(ranks))


def test_bytes_are_those_of_the_stages():
    costs = equal_costs(2)
    costs = type(costs)(costs.forward, costs.input, costs.weight, (100, 7))
    assert peak_activations(make_schedule("1f1b", 2, 4), costs).bytes == (200, 7)


def test_a_transfer_delays_the_other_rank_alone():
    costs = equal_costs(2)
    slow = type(costs)(costs.forward, costs.input, costs.weight, costs.activation, None, 0.5)
    assert simulate(make_schedule("1f1b", 2, 1), slow).makespan == 1 + 0.5 + 3 + 0.5 + 2
    assert simulate(make_schedule("zb_v", 1, 1)).makespan == 6


def lists(*rows):
    parsed = [[parse_action(cell) for cell in row.split()] for row in rows]
    return pipeline(1 + max(a.micro for row in parsed for a in row), loop_placement(len(rows)), parsed)


def test_deadlock_names_the_circle():
    with pytest.raises(Deadlock) as caught:
        simulate(lists("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert str(caught.value) == (
        "the ranks would wait for ever: rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1 of rank 0"
    )


def test_deadlock_in_a_rank_of_its_own():
    with pytest.raises(Deadlock, match="rank 0 waits at 0B0 for 0F0, which comes later in its own list"):
        simulate(lists("0B0 0F0"))


def test_what_nobody_does():
    with pytest.raises(Deadlock, match="rank 1 waits at 1F0 for 0F0, which no rank does"):
        simulate(lists("0F1", "1F0 1F1"))


def test_messages():
    with pytest.raises(ScheduleError, match="at least 8 micro-batches, not 6") as caught:
        make_schedule("dualpipe_v", 4, 6)
    assert "microbatches = 8" in caught.value.help
    with pytest.raises(ScheduleError, match="one stage on each rank, not 2"):
        make_schedule("1f1b", 4, 8, virtual=2)
    with pytest.raises(ScheduleError) as caught:
        make_schedule("zbv", 4, 6)
    assert caught.value.help == "did you mean `zb_v`?"
