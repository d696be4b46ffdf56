"""`schedule = auto`: the shortest schedule found for measured or estimated stage costs within a memory limit.

Candidates are the named schedules of the same placement and what the list scheduler (`compiler.schedule.greedy`) makes
of a grid of policies; those that keep the limit are timed, and the best are improved by local search. So the result
is never longer than a named schedule that fits. Backwards are split only where that makes the schedule shorter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from compiler.schedule.actions import Action, Pipeline, ScheduleError, loop_placement, v_placement
from compiler.schedule.costs import StageCosts, equal_costs
from compiler.schedule.greedy import Policy, greedy
from compiler.schedule.improve import improve
from compiler.schedule.timing import peak_activations, simulate

EFFORT = 150_000  # actions simulated in local search
FINALISTS = 2

Makers = Mapping[str, Callable[[int, int, int], Pipeline]]


def auto(ranks: int, microbatches: int, virtual: int, costs: StageCosts | None, named: Makers) -> Pipeline:
    """The shortest schedule found with `virtual` stages on each rank; of equally short ones that with the least
    memory. `named`: the schedules that are candidates."""
    costs = costs or equal_costs(ranks * virtual)
    placements = [loop_placement(ranks, virtual)] + ([v_placement(ranks)] if virtual == 2 and ranks > 1 else [])
    if costs.limit is not None:
        # Less than one micro-batch cannot be alive: such a limit asks for the least memory.
        costs = replace(costs, limit=max(costs.limit, min(_need(place, costs) for place in placements)))
    fitting = [place for place in placements if costs.limit is None or _need(place, costs) <= costs.limit]
    candidates = [c for c in _named(ranks, microbatches, virtual, named) if c.rank_of in fitting and _fits(c, costs)]
    for placement in fitting:
        candidates += [
            greedy(microbatches, placement, costs, policy) for policy in _policies(ranks, microbatches, virtual)
        ]
    finalists = sorted(dict.fromkeys(candidates), key=lambda c: _merit(c, costs))[:FINALISTS]
    tries = EFFORT // (FINALISTS * sum(map(len, finalists[0].actions)))
    improved = [
        improve(c, costs, lambda changed: _fits(changed, costs), lower_bound(c, costs), tries) for c in finalists
    ]
    return _joined(min(improved, key=lambda c: _merit(c, costs)), costs)


def _named(ranks: int, microbatches: int, virtual: int, named: Makers) -> Iterator[Pipeline]:
    for make in named.values():
        try:
            yield make(ranks, microbatches, virtual)
        except ScheduleError:
            continue  # not for so many stages or micro-batches


def _policies(ranks: int, microbatches: int, virtual: int) -> Iterator[Policy]:
    alive = sorted({min(factor * ranks, microbatches) for factor in (0.5, 1, 2)} | {microbatches})
    deep = (False, True) if virtual > 1 else (False,)
    for count, eager, deepest, patience in itertools.product(alive, (False, True), deep, (0.0, 1.0)):
        yield Policy(count, eager, deepest, patience)


def _need(rank_of: tuple[int, ...], costs: StageCosts) -> int:
    """Bytes of one micro-batch's activations on the rank that has most."""
    return max(sum(b for b, where in zip(costs.activation, rank_of) if where == rank) for rank in set(rank_of))


def _fits(pipeline: Pipeline, costs: StageCosts) -> bool:
    return costs.limit is None or max(peak_activations(pipeline, costs).bytes) <= costs.limit


def _merit(pipeline: Pipeline, costs: StageCosts) -> tuple[float, int]:
    """Less is better. Rounding shall not decide."""
    return float(f"{simulate(pipeline, costs).makespan:.9g}"), max(peak_activations(pipeline, costs).bytes)


def lower_bound(pipeline: Pipeline, costs: StageCosts) -> float:
    """Seconds that no order of this placement can beat: a rank begins when the first micro-batch reaches it, and then
    has all of its work to do."""
    bounds = []
    for rank in range(pipeline.ranks):
        stages = [stage for stage, where in enumerate(pipeline.rank_of) if where == rank]
        work = sum(costs.seconds("F", stage) + costs.seconds("B", stage) for stage in stages) * pipeline.microbatches
        hops = sum(a != b for a, b in itertools.pairwise(pipeline.rank_of[: stages[0] + 1]))
        bounds.append(sum(costs.forward[: stages[0]]) + hops * costs.transfer + work)
    return max(bounds)


def _joined(pipeline: Pipeline, costs: StageCosts) -> Pipeline:
    """Input and weight parts of a stage, wherever they follow each other, are whole backwards if that costs no time."""
    makespan = simulate(pipeline, costs).makespan
    for stage in range(pipeline.stages):
        rank = pipeline.rank_of[stage]
        actions: list[Action] = []
        for action in pipeline.actions[rank]:
            if action.kind == "W" and action.stage == stage and actions[-1] == replace(action, kind="I"):
                actions[-1] = replace(action, kind="B")
            else:
                actions.append(action)
        joined = replace(
            pipeline, actions=(*pipeline.actions[:rank], tuple(actions), *pipeline.actions[rank + 1 :])
        )  # fmt: skip
        if simulate(joined, costs).makespan <= makespan * (1 + 1e-12):
            pipeline = joined
    return pipeline
