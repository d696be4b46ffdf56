"""What a pipeline does: for each rank, an ordered list of actions on (virtual stage, micro-batch).

A schedule says *when* each rank works on what; the arithmetic, the sends and the receives follow from it. It is made
by pure functions (`compiler.schedule.named`), judged by `compiler.schedule.timing`, checked by `compiler.schedule.check`
and lowered to instruction streams by `compiler.schedule.stream`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

KINDS = "FBIW"
_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


class ScheduleError(ValueError):
    """There is no such schedule; `message` says why and `help` what would be right."""

    def __init__(self, message: str, help: str = ""):
        super().__init__(message)
        self.message, self.help = message, help


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does: F forward, B whole backward, I input-gradient part, W weight-gradient part.

    Of virtual stage `stage` and micro-batch `micro`; `2F3` is the forward of stage 2 on micro-batch 3.
    """

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


def parse_action(text: str) -> Action | None:
    """The inverse of `str(action)`; None if it is no action."""
    match = _CELL.fullmatch(text)
    return Action(match[2], int(match[1]), int(match[3])) if match else None


@dataclass(frozen=True)
class Pipeline:
    """A schedule. `rank_of[stage]` is the pipeline rank of each virtual stage, `actions[rank]` its ordered list."""

    ranks: int
    stages: int
    microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        """A line for each rank, cells separated by commas: what `compiler.schedule.table` reads back."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.actions)


def pipeline(microbatches: int, rank_of: Iterable[int], actions: Iterable[Iterable[Action]]) -> Pipeline:
    """A `Pipeline` of these lists."""
    lists, placement = tuple(map(tuple, actions)), tuple(rank_of)
    return Pipeline(len(lists), len(placement), microbatches, placement, lists)


def whole_backwards(pipeline: Pipeline) -> Pipeline:
    """An input part of stage 0 right before its weight part is one whole backward: nobody waits for its gradient."""
    return replace(pipeline, actions=tuple(tuple(_merged(actions)) for actions in pipeline.actions))


def forwards(pipeline: Pipeline) -> Pipeline:
    """The schedule of a program that has no backward: the forward actions in their order."""
    kept = (tuple(action for action in actions if action.kind == "F") for actions in pipeline.actions)
    return replace(pipeline, actions=tuple(kept))


def _merged(actions: Sequence[Action]) -> Iterator[Action]:
    k = 0
    while k < len(actions):
        action = actions[k]
        k += 1
        if action.kind == "I" and action.stage == 0 and actions[k] == replace(action, kind="W"):
            action = replace(action, kind="B")
            k += 1
        yield action


def loop_placement(ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """Stage s on rank s mod p: with several stages each, the micro-batch goes around the ranks that often."""
    return tuple(stage % ranks for stage in range(ranks * virtual))


def v_placement(ranks: int) -> tuple[int, ...]:
    """Two stages a rank, down and up again: the first and the last rank-0 stages see the input and the loss."""
    return (*range(ranks), *reversed(range(ranks)))
