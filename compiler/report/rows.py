"""Rows of the table of requests."""

from __future__ import annotations

from dataclasses import dataclass

APPLIED, PARTLY, REFUSED, NOTHING = "applied", "partly", "refused", "no effect"


@dataclass(frozen=True)
class Asked:
    """One request: the plan's words, "applied", "partly", "refused" or "no effect", and in how many places or why."""

    request: str
    outcome: str
    detail: str


def many(count: int, thing: str) -> str:
    """1 bucket, 2 buckets, 2 micro-batches."""
    return f"{count} {thing}" + ("" if count == 1 else "es" if thing.endswith("ch") else "s")
