"""From a pipeline's schedule to the work of its ranks: an action on a stage is the work of the stage's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compiler.schedule.actions import Action, Pipeline
from compiler.schedule.work import CallInfo, Work


def pipeline_work(schedule: Pipeline, infos: Sequence[CallInfo], stages: Mapping[str, tuple[int, ...]]) -> list[list[Work]]:
    """The work of each pipeline rank. `stages` are the (virtual) stages that run each call: several for what each of them
    computes for itself, once for each rank and micro-batch."""
    found = []
    for actions in schedule.actions:
        done: set[tuple[str, int]] = set()
        work: list[Work] = []
        for action in actions:
            calls = [info for info in infos if action.stage in stages[info.call.name]]
            for item in action_work(action, calls):
                if item.op == "forward":
                    if (item.info.call.name, item.micro) in done:
                        continue
                    done.add((item.info.call.name, item.micro))
                work.append(item)
        found.append(work)
    return found


def action_work(action: Action, calls: Sequence[CallInfo]) -> list[Work]:
    """What one action does: forward in order, backwards in reverse. A backward that has no weight part is done with the
    input parts, whole."""
    if action.kind == "F":
        return [Work("forward", info, action.micro) for info in calls]
    backwards = [info for info in reversed(calls) if info.has_backward]
    if action.kind == "B":
        return [Work("backward", info, action.micro) for info in backwards]
    if action.kind == "I":
        ops = ["backward" if info.weight_needed is None else "backward_input" for info in backwards]
        return [Work(op, info, action.micro) for op, info in zip(ops, backwards)]
    return [Work("backward_weight", info, action.micro) for info in backwards if info.weight_needed is not None]
