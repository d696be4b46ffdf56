"""Measured times: what a trace (`planc run --trace`) says that calls take, in the place of what the roofline predicts.

A trace of any plan of the model will do whose segments have the same names: of one device, of another schedule. A
call that it does not show keeps its prediction, scaled as the predictions of those shown were off.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from compiler.analysis.cost import Cost, KindCost
from compiler.diagnostics import Diagnostic, PlanError, closest, declare_codes
from compiler.dsl.plan import Plan
from compiler.pipeline.loads import Load

declare_codes({"E233": "a trace that cannot be read, or that shows none of the plan's segments"})

Times = Mapping[tuple[str, str], float]
"""(operation, call) → seconds, the median of what a trace shows."""


def measured(plan: Plan, weighed: Sequence[Load]) -> list[Load]:
    """The loads with the times of the trace that the plan names, if it does. Raises PlanError."""
    if plan.pipeline is None or plan.pipeline.times is None:
        return list(weighed)
    times = read_times(plan)
    calls = {call for _, call in times}
    known = [load for load in weighed if load.name in calls]
    if not known:
        raise refused(plan, f"{plan.pipeline.times} shows none of the segments", f"trace a run of this model: {names(weighed)}")
    off = statistics.median(
        times["forward", load.name] / load.cost.forward.seconds
        for load in known
        if ("forward", load.name) in times and load.cost.forward.seconds
    )
    return [replace(load, cost=timed(load.cost, load.name, times, off)) for load in weighed]


def timed(cost: KindCost, call: str, times: Times, off: float) -> KindCost:
    """The cost with measured seconds. A backward that was measured as a whole is shared out as predicted."""

    def taking(part: Cost, seconds: float) -> Cost:
        return replace(part, compute_s=seconds, seconds=seconds)

    whole = times.get(("backward", call))
    predicted = cost.input.seconds + cost.weight.seconds
    parts = []
    for op, part in (("backward_input", cost.input), ("backward_weight", cost.weight)):
        found = times.get((op, call))
        if found is None and whole is not None and predicted:
            found = whole * part.seconds / predicted
        parts.append(taking(part, part.seconds * off if found is None else found))
    forward = taking(cost.forward, times.get(("forward", call), cost.forward.seconds * off))
    backward = taking(cost.backward, whole if whole is not None else sum(part.seconds for part in parts))
    return replace(cost, forward=forward, backward=backward, input=parts[0], weight=parts[1])


def read_times(plan: Plan) -> Times:
    """What the trace says. Raises PlanError."""
    assert plan.pipeline is not None and plan.pipeline.times is not None
    span = plan.pipeline.given.get("times")
    base = Path(span.file if span is not None and not span.file.startswith("--") else plan.path).parent
    path = base / plan.pipeline.times
    found: dict[tuple[str, str], list[float]] = {}
    try:
        for event in json.loads(path.read_text())["traceEvents"]:
            if event.get("ph") == "X" and event["cat"].startswith(("forward", "backward")):
                found.setdefault((event["cat"], event["name"].split()[1]), []).append(event["dur"] / 1e6)
    except OSError as error:
        near = closest(path.name, [file.name for file in path.parent.glob("*.json")])
        help = f"did you mean `{near}`?" if near else "write one: planc run x.plan --trace FILE"
        raise refused(plan, f"cannot read {path}: {error.strerror}", help) from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise refused(plan, f"{path} is no trace of a planc run", "write one: planc run x.plan --trace FILE") from None
    return {key: statistics.median(seconds) for key, seconds in found.items()}


def refused(plan: Plan, message: str, help: str) -> PlanError:
    assert plan.pipeline is not None
    span = plan.pipeline.given.get("times", plan.pipeline.span)
    return PlanError([Diagnostic("error", "E233", message, span, help=(help,))], plan.sources)


def names(weighed: Sequence[Load]) -> str:
    shown = [load.name for load in weighed]
    return ", ".join(shown[:4]) + (", …" if len(shown) > 4 else "")
