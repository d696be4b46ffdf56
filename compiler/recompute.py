"""Which recomputation policy a segment has."""

from __future__ import annotations

from compiler.dsl.plan import Plan


def policy_for(plan: Plan, unit: str) -> str:
    """"none", "selective" or "full"; of several rules the last that matches counts."""
    policy = "none"
    for rule in plan.recompute:
        if unit and any(pattern.matches(unit) for pattern in rule.patterns):
            policy = rule.policy
    return policy
