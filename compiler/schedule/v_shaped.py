"""Schedules whose stages lie on the ranks as a V: down with the first half, up again with the second.

A rank's first stage is `0` in the tables, its second `1`; rank 0 has both the input and the loss. A micro-batch turns
around on the last rank without a message.
"""

from __future__ import annotations

from compiler.schedule.actions import Action, Pipeline, ScheduleError, pipeline, v_placement
from compiler.schedule.phases import play


def zb_v(ranks: int, microbatches: int) -> Pipeline:
    """ZB-V (Qi et al. 2024, https://arxiv.org/abs/2401.10241, section 6).

    No bubble between the first and the last action of a rank where forward, input and weight part take equally long
    and m >= 2p; every rank holds at most 2p activations of half a rank's layers, as much as 1F1B's first rank.
    Fewer than 2p-1 micro-batches do what they would do among 2p-1.
    """
    played = max(microbatches, 2 * ranks - 1)
    lists = []
    for rank in range(ranks):
        behind = ranks - rank
        phases = (
            (2 * behind - 1, "F0"),
            (rank, "F1 F0"),
            (behind, "F1 I1 W1"),
            (played - ranks - behind + 1, "F0 I0 W0 F1 I1 W1"),
            (behind - 1, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (behind, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        )
        lists.append([a for a in play(phases, _stages(ranks, rank)) if a.micro < microbatches])
    return pipeline(microbatches, v_placement(ranks), lists)


def dualpipe_v(ranks: int, microbatches: int) -> Pipeline:
    """DualPipeV (DeepSeek, https://github.com/deepseek-ai/DualPipe; "cut-in-half" DualPipe, Qi et al. 2025).

    In the steady phase a forward stands next to a backward of the rank's other stage, so that the communication of
    one hides behind the computation of the other. Whole backwards there, split ones where the pipeline fills and
    drains; every rank holds at most 2p+1 activations of half a rank's layers.
    """
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"`dualpipe_v` on {ranks} ranks takes at least {2 * ranks} micro-batches, not {microbatches}",
            f"use `microbatches = {2 * ranks}`, or `schedule = zb_v`",
        )
    lists: list[list[Action]] = []
    for rank in range(ranks):
        below, half = ranks - rank - 1, (rank + 1) // 2
        phases = (
            (2 * below, "F0"),
            (rank + 1, "F0 F1"),
            (below, "I1 W F1"),
            (microbatches - ranks - below, "F0 B1 F1 B0"),
            (below, "B1 F1 B0"),
            (half, "B1 B0"),
            ((rank + 1) % 2, "B1 I0"),
            (half, "I1 I0"),
            (below, "W I0"),
            (rank + 1, "W"),
        )
        lists.append(play(phases, _stages(ranks, rank)))
    return pipeline(microbatches, v_placement(ranks), lists)


def _stages(ranks: int, rank: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank
