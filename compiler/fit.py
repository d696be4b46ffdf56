"""`recompute … = fit(BYTES)`: the cheapest recomputation with which every rank's memory stays below a limit.

Each unit (a layer) may keep everything, recompute what is cheap (`selective`), or recompute everything (`full`). A move
from one policy to the next frees bytes and costs seconds; moves are taken in the order of bytes freed for each second,
earlier layers first (what the last layers save lives shortest). How many are needed is found by bisection, for each
pipeline stage, with the memory reader as the judge: what it says is what is allocated
(`compiler.analysis.memory`), so the limit is kept by the program that comes out, and not by a model of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compiler.analysis.cost import KindCost, costs
from compiler.analysis.dry_run import dry_run
from compiler.analysis.machine import machine
from compiler.analysis.memory import read_memory
from compiler.diagnostics import Diagnostic, PlanError, declare_codes
from compiler.dsl.plan import Pattern, Plan, RecomputeRule
from compiler.dsl.units import show_size
from compiler.recompute import FIT, rule_for

if TYPE_CHECKING:
    from compiler.driver import Compilation

declare_codes({"E206": "no recomputation makes the plan fit into the memory that it allows"})

POLICIES = ("none", "selective", "full")
Build = Callable[[Plan], "Compilation"]


@dataclass(frozen=True)
class Fitted:
    """What was chosen: the policy of each unit, and the bytes that the fullest rank then needs at its peak."""

    policies: Mapping[str, str]
    limit: int
    peak: int

    def __str__(self) -> str:
        counts = Counter(self.policies.values())
        chosen = ", ".join(f"{counts[policy]} {policy}" for policy in POLICIES if counts[policy])
        return f"{chosen}; the fullest rank needs {show_size(self.peak)}"


@dataclass(frozen=True)
class Move:
    """A unit's next policy: bytes that it frees, seconds that it costs."""

    unit: str
    policy: str
    freed: int
    seconds: float

    @property
    def worth(self) -> float:
        return self.freed / self.seconds if self.seconds > 0 else float("inf")


def fit(plan: Plan, build: Build, refuse: bool = True) -> tuple[Plan, Fitted | None]:
    """The plan with its `fit` rules replaced by a policy for each unit, and what was chosen; the plan itself if it has
    no such rules. `build` links a plan. Raises PlanError if nothing fits; without `refuse` (in float64, where nothing is
    as large as in the plan) the smallest is taken."""
    rules = [rule for rule in plan.recompute if rule.policy == FIT]
    if not rules:
        return plan, None
    return _Search(plan, build, min(rules, key=lambda rule: rule.limit or 0)).run(refuse)


class _Search:
    def __init__(self, plan: Plan, build: Build, rule: RecomputeRule):
        self.plan, self.build, self.rule, self.limit = plan, build, rule, rule.limit or 0
        self.tried: dict[tuple[tuple[str, str], ...], tuple[int, ...]] = {}

    def run(self, refuse: bool) -> tuple[Plan, Fitted | None]:
        keeping, selective, full = (self.build(self.everywhere(policy)) for policy in POLICIES)
        stages = self.units(keeping)
        units = [unit for own in stages for unit in own]
        if not units:
            return self.plan, None
        moves = [list(self.moves(own, (keeping, selective, full))) for own in stages]
        counts = self.bisect(moves)
        policies = self.after(units, moves, counts)
        peak = max(self.peaks(policies))
        if peak > self.limit and refuse:
            self.refuse(min(max(peaks) for peaks in self.tried.values()))
        return self.with_policies(policies), Fitted(policies, self.limit, peak)

    # -- moves ---------------------------------------------------------------------------------------------------

    def units(self, compilation: Compilation) -> list[list[str]]:
        """The units that a `fit` rule is for, by pipeline stage, in their order."""
        stage = {call.name: call.stages[0] for call in compilation.program.calls}
        found: list[list[str]] = [[] for _ in compilation.program.streams]
        for segment in compilation.linked.segments:
            rule = rule_for(self.plan, segment.unit)
            own = found[stage.get(segment.name, 0)]
            if rule is not None and rule.policy == FIT and segment.unit not in own:
                own.append(segment.unit)
        return found

    def moves(self, units: Sequence[str], built: Sequence[Compilation]) -> Iterator[Move]:
        """The moves of a stage's units, the best first. A first move that is worse than the second is taken with it."""
        priced = [prices(compilation) for compilation in built]
        found: list[tuple[float, int, int, Move]] = []
        for place, unit in enumerate(units):
            saved, seconds = zip(*(price[unit] for price in priced))
            steps = [Move(unit, POLICIES[k], saved[k - 1] - saved[k], seconds[k] - seconds[k - 1]) for k in (1, 2)]
            if steps[0].worth < steps[1].worth:
                steps = [Move(unit, "full", saved[0] - saved[2], seconds[2] - seconds[0])]
            found += [(-move.worth, place, k, move) for k, move in enumerate(steps) if move.freed > 0]
        for *_, move in sorted(found, key=lambda item: item[:3]):
            yield move

    @staticmethod
    def after(units: Sequence[str], moves: Sequence[Sequence[Move]], counts: Sequence[int]) -> dict[str, str]:
        """The policies after the first so many moves of each stage."""
        taken = {move.unit: move.policy for own, count in zip(moves, counts) for move in own[:count]}
        return {unit: taken.get(unit, "none") for unit in units}

    def bisect(self, moves: Sequence[Sequence[Move]]) -> list[int]:
        """The fewest moves of each stage with which it fits; where that is all of them, it may not."""
        units = list(dict.fromkeys(move.unit for own in moves for move in own))
        low, high = [0] * len(moves), [len(own) for own in moves]
        while low != high:
            middle = [(a + b) // 2 for a, b in zip(low, high)]
            peaks = self.peaks(self.after(units, moves, middle))
            for stage, peak in enumerate(peaks):
                if peak <= self.limit:
                    high[stage] = middle[stage]
                else:
                    low[stage] = min(middle[stage] + 1, high[stage])
        return high

    # -- judging -------------------------------------------------------------------------------------------------

    def peaks(self, policies: Mapping[str, str]) -> tuple[int, ...]:
        """The peak of each stage."""
        key = tuple(policies.items())
        if key not in self.tried:
            compilation = self.build(self.with_policies(policies))
            stages = range(len(compilation.program.streams))
            self.tried[key] = tuple(read_memory(dry_run(compilation, stage)).peak.bytes for stage in stages)
        return self.tried[key]

    def everywhere(self, policy: str) -> Plan:
        """The plan with one policy in place of `fit`."""
        rules = (replace(rule, policy=policy) if rule.policy == FIT else rule for rule in self.plan.recompute)
        return replace(self.plan, recompute=tuple(rules))

    def with_policies(self, policies: Mapping[str, str]) -> Plan:
        """The plan with a rule for each unit behind its own."""
        rules = (RecomputeRule(patterns=(Pattern(unit),), policy=policy) for unit, policy in policies.items())
        return replace(self.everywhere("none"), recompute=(*self.everywhere("none").recompute, *rules))

    def refuse(self, nearest: int) -> None:
        diagnostic = Diagnostic(
            "error",
            "E206",
            f"the plan needs {show_size(nearest)} on its fullest rank even if as much as possible is recomputed",
            self.rule.span,
            label=f"{show_size(self.limit)} are allowed",
            help=("use more micro-batches of fewer rows, `tensor` or `zero`", "see: planc estimate PLAN"),
        )
        raise PlanError([diagnostic], self.plan.sources)


def prices(compilation: Compilation) -> dict[str, tuple[int, float]]:
    """Unit → bytes that it saves for its backward, and seconds of that."""
    device = machine(compilation.plan, compilation.mesh)
    cost: dict[str, KindCost] = {name: costs(kind, device) for name, kind in compilation.linked.kinds.items()}
    kinds = {call.name: call.kind for call in compilation.program.calls}
    found: dict[str, tuple[int, float]] = {}
    for segment in compilation.linked.segments:
        if segment.unit:
            saved, seconds = found.get(segment.unit, (0, 0.0))
            own = cost[kinds[segment.name]]
            found[segment.unit] = saved + own.saved_bytes, seconds + own.backward.seconds
    return found
