"""Schedules with one stage on each rank and whole backwards: GPipe and 1F1B."""

from __future__ import annotations

from compiler.schedule.actions import Action, Pipeline, loop_placement, pipeline


def gpipe(ranks: int, microbatches: int) -> Pipeline:
    """All forwards, then all backwards (Huang et al. 2019, https://arxiv.org/abs/1811.06965).

    Bubble (p-1)/m of the ideal time; every rank holds the activations of all m micro-batches.
    """
    return pipeline(
        microbatches,
        loop_placement(ranks),
        [
            [Action(kind, rank, micro) for kind in "FB" for micro in range(microbatches)]
            for rank in range(ranks)
        ],
    )  # fmt: skip


def one_f_one_b(ranks: int, microbatches: int) -> Pipeline:
    """After a warm-up, one forward and one backward in turn (PipeDream-Flush, Narayanan et al. 2021,
    https://arxiv.org/abs/2006.09503).

    Bubble (p-1)/m of the ideal time, as GPipe; rank r holds the activations of at most p-r micro-batches.
    """
    lists = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, microbatches)
        forwards = [Action("F", rank, micro) for micro in range(microbatches)]
        backwards = [Action("B", rank, micro) for micro in range(microbatches)]
        steady = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
        lists.append(forwards[:ahead] + steady + backwards[microbatches - ahead :])
    return pipeline(microbatches, loop_placement(ranks), lists)
