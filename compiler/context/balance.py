"""How even the work of attention is over the ranks that share a sequence."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.blocks import visible_blocks
from runtime.cuts import Cut, Run, runs


def seen_by_rank(length: int, ways: int, order: str, causal: bool, window: int | None = None) -> list[float]:
    """Pairs of a query and a key that each rank's queries see, of one sequence with itself."""
    cut = Cut(0, ("cp",), 1, length, 1, order)
    whole = (Run(0, 0, length),)
    found = []
    for rank in range(ways):
        queries = tuple(runs((cut,), length, {"cp": ways}, {"cp": rank}))
        found.append(sum(block.area for block in visible_blocks(queries, whole, causal, window)))
    return found


def imbalance(work: Sequence[float]) -> float:
    """The most that a rank does over the mean: 1 is even."""
    mean = sum(work) / len(work)
    return max(work) / mean if mean else 1.0
