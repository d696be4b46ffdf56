"""The ladder: a plan's strategies turned on one after the other, each rung compared with one device.

Where a whole plan does not compute what the model means, the first rung that fails names the strategy to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from compiler.analysis.verify import Verdict, verify
from compiler.dsl.plan import Plan

STRATEGIES = ("data", "zero", "tensor", "context", "pipeline")


@dataclass(frozen=True)
class Rung:
    """A plan with some of its strategies; `added` is the one that the rung below does not have."""

    added: str
    plan: Plan


def rungs(plan: Plan) -> Iterator[Rung]:
    """One device, then strategy after strategy, then what changes no layout: recomputation and clipping."""
    bare = replace(plan, recompute=(), clip=None)
    kept: tuple[str, ...] = ()
    yield Rung("one device", only(bare, kept))
    for word in STRATEGIES:
        strategy = getattr(plan, word)
        if strategy is not None and (any(plan.axis_size(axis) > 1 for axis in strategy.axes) or word == "pipeline"):
            kept = (*kept, word)
            yield Rung(f"{word} over {', '.join(strategy.axes)}", only(bare, kept))
    if plan.recompute:
        yield Rung("recompute", replace(only(plan, kept), clip=None))
    if plan.clip is not None:
        yield Rung("clip", only(plan, kept))


def only(plan: Plan, kept: tuple[str, ...]) -> Plan:
    """The plan with these strategies alone; the axes of the others have one rank."""
    changes = {word: None for word in STRATEGIES if word not in kept}
    used = {axis for word in kept for axis in getattr(plan, word).axes}
    mesh = tuple(axis if axis.name in used else replace(axis, size=1) for axis in plan.mesh)
    batch = [getattr(plan, word) for word in ("pipeline", "data") if word in kept]
    parts = next((strategy.microbatches for strategy in batch if strategy.microbatches), 1)
    return replace(plan, mesh=mesh, microbatches=parts, **changes)


@dataclass(frozen=True)
class Step:
    """A rung with what its comparison found."""

    rung: Rung
    verdict: Verdict


def climb(plan: Plan, steps: int, tell: Callable[[Step], None]) -> Step | None:
    """Verify rung after rung, `tell` each; the first that fails, or None. Raises PlanError and RankFailure as `verify`
    does."""
    for rung in rungs(plan):
        step = Step(rung, verify(rung.plan, steps))
        tell(step)
        if not step.verdict.ok:
            return step
    return None
