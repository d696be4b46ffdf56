"""The same orders as torch.distributed.pipelining's own tables, where both have a schedule."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules

from compiler.schedule.actions import Action, Pipeline, parse_action, pipeline
from compiler.schedule.named import make_schedule
from compiler.schedule.one_f_one_b import zb_h1
from compiler.schedule.timing import peak_activations, simulate
from compiler.schedule.v_shaped import dualpipe_v, zb_v


def table(kind: type, ranks: int, microbatches: int, virtual: int) -> list[list[Action]]:
    """torch's lists, from the method that makes a rank's; the constructor would need a process group."""
    rows = []
    for rank in range(ranks):
        rounds = max(1, microbatches // ranks)
        scheduler = SimpleNamespace(
            rank=rank, pp_group_size=ranks, n_local_stages=virtual, num_stages=ranks * virtual, _num_stages=ranks,
            _n_microbatches=microbatches, microbatches_per_round=microbatches // rounds,
        )  # fmt: skip
        if kind is schedules.Schedule1F1B:
            order = kind._get_pipeline_order(scheduler)[rank]
        else:
            order = kind._calculate_single_rank_operations(scheduler, rank)
        rows.append([part for action in order if action is not None for part in flat(action)])
    return rows


def flat(action) -> list[Action]:
    parts = [parse_action(str(part)) for part in action.sub_actions or (action,)]
    return [part for part in parts if part is not None]  # a REDUCE_GRAD is none of ours


def equal(ours: Pipeline, theirs: list[list[Action]]) -> None:
    assert str(ours) == str(pipeline(ours.microbatches, ours.rank_of, theirs))


SIZES = [(1, 2), (2, 2), (2, 6), (3, 9), (4, 8), (4, 4), (8, 24)]


@pytest.mark.parametrize("ranks, microbatches", SIZES)
def test_1f1b(ranks, microbatches):
    """Of the last rank torch's table (not what it runs) counts forwards from 1."""
    ours, theirs = make_schedule("1f1b", ranks, microbatches), table(schedules.Schedule1F1B, ranks, microbatches, 1)
    equal(ours, [*theirs[:-1], list(ours.actions[-1])])


@pytest.mark.parametrize("ranks, microbatches", [*SIZES, (4, 10), (4, 3), (3, 5)])
@pytest.mark.parametrize("virtual", [2, 3, 4])
def test_interleaved(ranks, microbatches, virtual):
    theirs = table(schedules.ScheduleInterleaved1F1B, ranks, microbatches, virtual)
    equal(make_schedule("interleaved", ranks, microbatches, virtual), theirs)


@pytest.mark.parametrize("ranks, microbatches", SIZES)
def test_zb_h1(ranks, microbatches):
    equal(zb_h1(ranks, microbatches), table(schedules.ScheduleInterleavedZeroBubble, ranks, microbatches, 1))


@pytest.mark.parametrize("ranks, microbatches", [*SIZES, (4, 3), (4, 1), (5, 7)])
def test_zb_v(ranks, microbatches):
    equal(zb_v(ranks, microbatches), table(schedules.ScheduleZBVZeroBubble, ranks, microbatches, 2))


@pytest.mark.parametrize("ranks, microbatches", [(1, 2), (2, 4), (2, 7), (3, 9), (4, 8), (8, 24)])
def test_dualpipe_v(ranks, microbatches):
    equal(dualpipe_v(ranks, microbatches), table(schedules.ScheduleDualPipeV, ranks, microbatches, 2))


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "dualpipe_v"])
def test_whole_backwards_of_the_first_stage_cost_nothing(name):
    makes = {"zb_h1": zb_h1, "zb_v": zb_v, "dualpipe_v": dualpipe_v}
    ours, split = make_schedule(name, 4, 12), makes[name](4, 12)
    assert simulate(ours).makespan == simulate(split).makespan
    assert peak_activations(ours) == peak_activations(split)
    assert "0B0" in str(ours)
