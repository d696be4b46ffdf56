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
            help = "change the order of one of these actions"
            found.append(Problem(error.message, help, error.rank, error.index))
    return found


def _misplaced(pipeline: Pipeline) -> Iterator[Problem]:
    """Actions that should not be there, or not there yet."""
    for rank, actions in enumerate(pipeline.actions):
        seen: set[Action] = set()
        for index, action in enumerate(actions):
            objection = _objection(action, rank, pipeline, seen)
            if objection:
                yield Problem(*objection, rank, index)
            seen.add(action)


def _objection(action: Action, rank: int, pipeline: Pipeline, seen: set[Action]) -> tuple[str, str] | None:
    """Why `action` cannot come on `rank` after those `seen`, and what would be right."""
    stage, micro = action.stage, action.micro
    forward, whole, input = (Action(kind, stage, micro) for kind in "FBI")
    if micro >= pipeline.microbatches:
        return f"there is no micro-batch {micro}", f"they are numbered from 0 to {pipeline.microbatches - 1}"
    if stage >= pipeline.stages:
        return f"there is no stage {stage}", f"they are numbered from 0 to {pipeline.stages - 1}"
    if pipeline.rank_of[stage] != rank:
        where = pipeline.rank_of[stage]
        return f"stage {stage} is on rank {where}, this is rank {rank}", f"move it, or all of stage {stage}"
    if action in seen:
        return f"{action} is done twice", ""
    if action.kind == "W":
        rule = "a weight part `W` follows its `I`; both together are `B`"
        return None if input in seen else (f"{action} comes before its input part {input}", rule)
    if action.kind in "BI":
        if forward not in seen:
            return f"{action} comes before the forward {forward}", "a backward follows its forward"
        other = input if action.kind == "B" else whole
        if other in seen:
            return f"{action} repeats the backward that {other} has done", ""
    return None


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
