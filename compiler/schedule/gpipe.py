"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from compiler.schedule.actions import Action, Pipeline, loop_placement, pipeline


def gpipe(ranks: int, microbatches: int) -> Pipeline:
    """Huang et al. 2019, https://arxiv.org/abs/1811.06965.

    Bubble (p-1)/m of the ideal time; every rank holds the activations of all m micro-batches.
    """
    return pipeline(
        microbatches,
        loop_placement(ranks),
        [[Action(kind, rank, micro) for kind in "FB" for micro in range(microbatches)] for rank in range(ranks)],
    )
