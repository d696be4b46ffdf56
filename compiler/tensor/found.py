"""What was cut how, in words: the styles of a compiled plan's parameters, and patterns that name many at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from compiler.ir.graph import Graph, Value
from compiler.layout.placement import Layout, Shard
from compiler.tensor.uses import ways


@dataclass(frozen=True)
class Found:
    """Weights by style, as patterns; `whole` are those that could be cut and are not. `share`: of the elements of all
    parameters, what part a rank does not hold whole."""

    patterns: dict[str, list[str]]
    share: float


def found_styles(lowered: Graph, main: Graph, axes: Collection[str], leave_out: Collection[str]) -> Found:
    """The styles of the parameters of `main`, but for those to be left out."""
    users = lowered.users()
    placed = {value.name: value.layout or Layout() for value in main.inputs if value.kind == "param"}
    by_style: dict[str, list[str]] = {"column": [], "row": [], "vocab": [], "whole": []}
    cut = total = 0
    for value in lowered.inputs:
        if value.kind != "param" or value.name not in placed:
            continue
        dims = [place.dim for axis in axes if isinstance(place := placed[value.name][axis], Shard)]
        total += math.prod(value.shape)
        cut += math.prod(value.shape) if dims else 0
        possible = ways(value, users)
        if possible and value.name not in leave_out:
            style = next((way.style for way in possible if dims and way.dim == dims[0]), "whole")
            by_style[style].append(module_or_name(value))
    every = {name for names in by_style.values() for name in names}
    patterns = {style: as_patterns(names, every - set(names)) for style, names in by_style.items() if names}
    return Found(patterns, cut / total if total else 0.0)


def module_or_name(value: Value) -> str:
    """A layer is named by its module, a parameter of another name by itself."""
    module, _, own = value.name.rpartition(".")
    return module if own == "weight" and module else value.name


def as_patterns(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Few patterns that match these names and none of the others: `layers.*.attn.w[qkv]`."""
    return merged(list(dict.fromkeys(starred(name, others) for name in names)))


def starred(name: str, others: Collection[str]) -> str:
    """The name with as many of its numbers as possible replaced by `*`, the first ones first."""
    parts = name.split(".")
    numbers = [k for k, part in enumerate(parts) if part.isdigit()]
    for count in range(len(numbers), 0, -1):
        for those in itertools.combinations(numbers, count):
            pattern = ".".join("*" if k in those else part for k, part in enumerate(parts))
            if not any(fnmatchcase(other, pattern) for other in others):
                return pattern
    return name


def merged(patterns: Sequence[str]) -> list[str]:
    """Patterns that differ in one last character as one: `w1`, `w3` → `w[13]`."""
    stems: dict[str, list[str]] = {}
    for pattern in patterns:
        stems.setdefault(pattern[:-1] if pattern[-1].isalnum() else pattern, []).append(pattern)
    return [f"{stem}[{''.join(p[-1] for p in those)}]" if len(those) > 1 else those[0] for stem, those in stems.items()]
