"""What became of the patterns of `segment`, `freeze`, `opaque`, `per_sample`, `local_statistics` and `recompute`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiler.diagnostics import Diagnostic, Diagnostics, declare_codes
from compiler.dsl.plan import Pattern, RecomputeRule
from compiler.recompute import rule_for
from compiler.report.rows import APPLIED, NOTHING, Asked, many
from compiler.segments.split import related

if TYPE_CHECKING:
    from compiler.driver import Compilation

LOCAL = "aten._native_batch_norm_legit"
"""What is left of batch_norm where statistics are local; elsewhere it is written out (`lower_batch_norm`)."""

declare_codes({"W208": "A pattern that fits modules, and has no effect on any of them."})


@dataclass(frozen=True)
class Effect:
    """In how many places a pattern did what its statement says; `why` and `help` where there is none."""

    word: str
    pattern: Pattern
    count: int
    thing: str
    why: str = ""
    help: str = ""

    @property
    def request(self) -> str:
        return f'{self.word} "{self.pattern.text}"'


def effects(c: Compilation) -> Iterator[Effect]:
    """Of every pattern of the plan that names modules."""
    plan = c.plan
    opaque = list(dict.fromkeys(node.args[0] for node in c.lowered.nodes if node.op == "planc.opaque"))
    norms = [node.origin.module for node in c.lowered.nodes if node.op.startswith(LOCAL)]
    units = list(dict.fromkeys(segment.unit for segment in c.linked.segments if segment.unit))

    def of(
        word: str, patterns: Iterable[Pattern], thing: str, count: Callable[[Pattern], int], why: str, help: str = ""
    ) -> Iterator[Effect]:
        for pattern in patterns:
            yield Effect(word, pattern, count(pattern), thing, why, help.format(pattern.text))

    def fitting(pattern: Pattern) -> list[str]:
        return [path for path in c.captured.modules if path and pattern.matches(path)]

    def runs_opaque(pattern: Pattern) -> int:
        return sum(any(f"{path}.".startswith(f"{other}.") for other in opaque) for path in fitting(pattern))

    def own_unit(pattern: Pattern) -> int:
        return sum(pattern.matches(unit) for unit in units)

    yield from of("opaque", plan.opaque, "module", runs_opaque, "the forward calls no such module")
    for pattern in plan.per_sample:
        near = [path for path in opaque for module in fitting(pattern) if related(path, module)]
        help = f'per_sample "{near[0]}"' if near else f'opaque "{pattern.text}"'
        count = sum(pattern.matches(path) for path in opaque)
        why = "it is for opaque modules, and none of these is one"
        yield Effect("per_sample", pattern, count, "opaque module", why, help)
    yield from of(
        "local_statistics", plan.local_statistics, "batch normalization",
        lambda pattern: sum(pattern.covers(module) for module in norms), "no batch statistics are taken there",
    )  # fmt: skip
    yield from of("segment", plan.segments, "module", own_unit, "the forward runs nothing there by itself")
    yield from of(
        "freeze", plan.freeze, "parameter", lambda pattern: sum(pattern.covers(name) for name in c.captured.parameters),
        "there are no parameters",
    )  # fmt: skip
    for rule in plan.recompute:
        yield from of(
            "recompute", rule.patterns, "segment", own_unit, "whole segments are recomputed, and none is cut for it",
            'add: segment "{}"',
        )  # fmt: skip


def without_effect(c: Compilation) -> list[Diagnostic]:
    """Warnings about patterns that changed nothing."""
    found = Diagnostics()
    for effect in effects(c):
        if not effect.count:
            message = f"`{effect.request}` has no effect: {effect.why}"
            found.warning("W208", message, effect.pattern.span, help=effect.help or ())
    return found.warnings


def asked_patterns(c: Compilation) -> Iterator[Asked]:
    """The rows of the table; `recompute` has its own, by rules."""
    for effect in effects(c):
        if effect.word != "recompute":
            outcome, detail = (APPLIED, many(effect.count, effect.thing)) if effect.count else (NOTHING, effect.why)
            yield Asked(effect.request, outcome, detail)


def recomputed(c: Compilation, rule: RecomputeRule) -> int:
    """The segments for which a rule is the last that fits."""
    return sum(rule_for(c.plan, segment.unit) is rule for segment in c.linked.segments)
