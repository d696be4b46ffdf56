"""Which modules to make segments of, where a pipeline has more stages than the model has segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from compiler.pipeline.loads import Load

SMALL = 0.05
"""A module with less than this share of its segment's parameters is no stage's work."""


def finer(loads: Sequence[Load], stages: int, state: Mapping[str, int]) -> list[str]:
    """Patterns for `segment` that give the calls at least so many segments: as few as will do, the largest modules
    first. Empty if no pattern suffices. `state`: bytes of each parameter."""
    weights: dict[str, int] = {}
    for load in loads:
        own = {child: held(child, load, state) for child in children(load)}
        for child, weight in own.items():
            if weight > SMALL * sum(own.values()):
                pattern = general(child)
                weights[pattern] = weights.get(pattern, 0) + weight
    chosen: list[str] = []
    for pattern in sorted(weights, key=lambda pattern: -weights[pattern]):
        if segments(loads, [*chosen, pattern]) > segments(loads, chosen):
            chosen.append(pattern)
        if segments(loads, chosen) >= stages:
            return [pattern for pattern in weights if pattern in chosen]
    return []


def children(load: Load) -> list[str]:
    """The modules directly inside of what a call was cut for; where there is just one, those inside of that."""
    base = load.unit
    while True:
        depth = base.count(".") + 2 if base else 1
        inside = [path for path in load.modules if not base or path.startswith(f"{base}.")]
        found = list(dict.fromkeys(".".join(path.split(".")[:depth]) for path in inside))
        if len(found) != 1 or found[0] == base:
            return found
        base = found[0]


def held(path: str, load: Load, state: Mapping[str, int]) -> int:
    """Bytes of the parameters that a call has of a module."""
    return sum(state.get(name, 0) for name in load.parameters if name.startswith(f"{path}."))


def general(path: str) -> str:
    """The module's name in all elements of its lists: "layers.*.attn"; of an element itself, its own."""
    *lists, last = path.split(".")
    return ".".join(["*" if part.isdigit() else part for part in lists] + [last])


def segments(loads: Sequence[Load], patterns: Sequence[str]) -> int:
    """How many segments the calls make if these modules become ones too."""
    count = 0
    for load in loads:
        cut = [child for child in children(load) if general(child) in patterns]
        home = [next((child for child in cut if f"{path}.".startswith(f"{child}.")), "") for path in load.modules]
        count += max(1, sum(1 for _ in groupby(home)))
    return count
