"""1F1B and what grew out of it: after a warm-up, one forward and one backward in turn.

The three schedules differ in the order of their forwards and backwards, in how many forwards they are ahead, and in
whether the weight part of a backward waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from compiler.schedule.actions import Action, Pipeline, ScheduleError, loop_placement, pipeline


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    steady = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
    return [*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :]]


def one_f_one_b(ranks: int, microbatches: int) -> Pipeline:
    """PipeDream-Flush (Narayanan et al. 2021, https://arxiv.org/abs/2006.09503).

    Bubble (p-1)/m of the ideal time, as GPipe's; rank r holds the activations of at most p-r micro-batches.
    """
    return pipeline(microbatches, loop_placement(ranks), [_list(ranks, rank, microbatches) for rank in range(ranks)])


def _list(ranks: int, rank: int, microbatches: int) -> list[Action]:
    """A rank's 1F1B list."""
    forwards = [Action("F", rank, micro) for micro in range(microbatches)]
    backwards = [Action("B", rank, micro) for micro in range(microbatches)]
    return alternate(forwards, backwards, ranks - rank - 1)


def zb_h1(ranks: int, microbatches: int) -> Pipeline:
    """1F1B whose backwards are split; rank r does the weight part of a micro-batch after the input parts of r more
    (ZB-H1, Qi et al. 2024, https://arxiv.org/abs/2401.10241).

    The gradient goes on to the next rank without waiting for the weight part, and weight parts fill what were bubbles
    at the end. Bubble (p-1)(T_F + T_I - T_W); every rank holds at most p micro-batches, as 1F1B's first does.
    """
    lists = []
    for rank in range(ranks):
        ready: list[Action] = []
        actions = []
        for action in _list(ranks, rank, microbatches):
            if action.kind == "F":
                actions.append(action)
                continue
            actions.append(Action("I", rank, action.micro))
            ready.append(Action("W", rank, action.micro))
            if len(ready) > rank:
                actions.append(ready.pop(0))
        lists.append(actions + ready)
    return pipeline(microbatches, loop_placement(ranks), lists)


def interleaved(ranks: int, microbatches: int, virtual: int) -> Pipeline:
    """1F1B with several stages on each rank, in rounds of about p micro-batches: a round's micro-batches do a rank's
    first stage one after the other, then its second (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473).

    Bubble (p-1)/(v·m) of the ideal time, for v times the messages and more activations: rank r is (v-1)·p + 2(p-r-1)
    forwards ahead, each of 1/v of the rank's layers. Micro-batches that do not divide by p make rounds that differ by
    one.
    """
    if virtual < 2:
        raise ScheduleError(
            "`interleaved` has at least two stages on each rank", "use `virtual = 2`, or `schedule = 1f1b`"
        )
    rounds = _rounds(microbatches, max(1, microbatches // ranks))
    lists = []
    for rank in range(ranks):
        stages = [rank + chunk * ranks for chunk in range(virtual)]
        forwards = [Action("F", stage, micro) for part in rounds for stage in stages for micro in part]
        backwards = [Action("B", stage, micro) for part in rounds for stage in reversed(stages) for micro in part]
        lists.append(alternate(forwards, backwards, (virtual - 1) * len(rounds[0]) + 2 * (ranks - rank - 1)))
    return pipeline(microbatches, loop_placement(ranks, virtual), lists)


def _rounds(microbatches: int, count: int) -> list[range]:
    """`count` runs of micro-batches, as equal as they can be, longer ones first."""
    size, longer = divmod(microbatches, count)
    starts = [k * size + min(k, longer) for k in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]
