"""Is a schedule complete and possible? What a schedule of the user's own has to keep.

Every stage does every micro-batch's forward once and then its backward once, whole (`B`) or as input part and later
weight part (`I`, `W`), all on one rank; and the ranks do not wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from compiler.schedule.actions import Action, Pipeline
from compiler.schedule.timing import Deadlock, simulate

WORDS = {"F": "forward", "B": "backward", "I": "input-gradient part", "W": "weight-gradient part"}


@dataclass(frozen=True)
class Problem:
    """What is wrong at action `index` of `rank` (both None: with the whole)."""

    message: str
    help: str = ""
    rank: int | None = None
    index: int | None = None


def problems(pipeline: Pipeline) -> list[Problem]:
    """Everything that is wrong with a schedule; the order of ranks is looked at once all actions are there."""
    found = [*_misplaced(pipeline)]
    found = found or [*_incomplete(pipeline)]
    if not found:
        try:
            simulate(pipeline)
        except Deadlock as error:
            found.append(Problem(error.message, "change the order of one of these actions"))
    return found


def _misplaced(pipeline: Pipeline) -> Iterator[Problem]:
    """Actions that should not be there, or not there yet."""
    seen: dict[Action, tuple[int, int]] = {}
    for rank, actions in enumerate(pipeline.actions):
        for index, action in enumerate(actions):
            kind, stage, micro = action.kind, action.stage, action.micro
            if micro >= pipeline.microbatches:
                last = pipeline.microbatches - 1
                yield Problem(f"there is no micro-batch {micro}", f"they are numbered from 0 to {last}", rank, index)
            elif stage >= pipeline.stages:
                yield Problem(
                    f"there is no stage {stage}", f"they are numbered from 0 to {pipeline.stages - 1}", rank, index
                )
            elif pipeline.rank_of[stage] != rank:
                yield Problem(
                    f"stage {stage} is on rank {pipeline.rank_of[stage]}, this is rank {rank}",
                    "a stage is on one rank only, where its parameters are", rank, index,
                )  # fmt: skip
            elif action in seen:
                yield Problem(f"{action} is done twice", "", rank, index)
            elif kind in "BI" and Action("F", stage, micro) not in seen:
                yield Problem(
                    f"{action} comes before the forward {stage}F{micro}", "a backward follows its forward", rank, index
                )
            elif kind == "W" and Action("I", stage, micro) not in seen:
                yield Problem(
                    f"{action} comes before its input part {stage}I{micro}",
                    "a weight part `W` follows its `I`; both together are `B`", rank, index,
                )  # fmt: skip
            elif kind in "BI" and Action("I" if kind == "B" else "B", stage, micro) in seen:
                other = Action("I" if kind == "B" else "B", stage, micro)
                yield Problem(f"{action} repeats the backward that {other} has done", "", rank, index)
            seen.setdefault(action, (rank, index))


def _incomplete(pipeline: Pipeline) -> Iterator[Problem]:
    """Actions that are missing; one message for each kind and stage."""
    done = {action for actions in pipeline.actions for action in actions}
    for stage in range(pipeline.stages):
        missing: dict[str, list[int]] = {}
        for micro in range(pipeline.microbatches):
            for kind in "FBW":
                if Action(kind, stage, micro) in done or (kind == "B" and Action("I", stage, micro) in done):
                    continue
                if kind != "W" or Action("I", stage, micro) in done:
                    missing.setdefault(kind, []).append(micro)
        for kind, micros in missing.items():
            shown = ", ".join(f"{stage}{kind}{micro}" for micro in micros[:5]) + (", …" if len(micros) > 5 else "")
            many = f"{len(micros)} of {pipeline.microbatches} micro-batches"
            yield Problem(
                f"stage {stage} has no {WORDS[kind]} of {many}: {shown}", f"add to rank {pipeline.rank_of[stage]}",
                pipeline.rank_of[stage],
            )  # fmt: skip
