"""Which recomputation policy a segment has."""

from __future__ import annotations

from compiler.dsl.plan import Plan
from compiler.segments.split import matches


def policy_for(plan: Plan, unit: str) -> str:
    """"none", "selective" or "full"; of several rules the last that matches counts."""
    policy = "none"
    for rule in plan.recompute:
        if unit and any(matches(pattern.text, unit) for pattern in rule.patterns):
            policy = rule.policy
    return policy
