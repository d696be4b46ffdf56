"""Which recomputation policy a segment has."""

from __future__ import annotations

from compiler.dsl.plan import Plan, RecomputeRule

FIT = "fit"
"""The policy that stands for the cheapest one that fits (see `compiler.fit`)."""


def policy_for(plan: Plan, unit: str) -> str:
    """The policy: "none", "selective" or "full"."""
    rule = rule_for(plan, unit)
    return rule.policy if rule is not None and rule.policy != FIT else "none"


def rule_for(plan: Plan, unit: str) -> RecomputeRule | None:
    """The rule for a unit; of several that match the last counts."""
    fitting = [rule for rule in plan.recompute if unit and any(pattern.matches(unit) for pattern in rule.patterns)]
    return fitting[-1] if fitting else None
