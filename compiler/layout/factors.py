"""Between placements and factors: which factor of a rule does a cut fall on, and the other way round."""

from __future__ import annotations

import math

from compiler.layout.placement import Layout, Mesh, Shard, normal, shard_axes
from compiler.layout.rule import Dims, Rule


def factor_at(shard: Shard, dims: Dims, rule: Rule, shape: tuple[int, ...], ways: int) -> str | None:
    """The factor that `shard` cuts, or None if it falls on no factor of this rule.

    `ways` is the number of parts that all axes together make of it.
    """
    before, size = 1, shape[shard.dim]
    for name in dims[shard.dim]:
        after = size // (before * rule.sizes[name]) if before * rule.sizes[name] else 1
        if before == shard.outer and rule.sizes[name] != 1:
            whole_units = rule.sizes[name] % ways == 0
            return name if shard.unit == after or (shard.unit == 1 and whole_units) else None
        before *= rule.sizes[name]
    return None


def shard_for(factor: str, dims: Dims, rule: Rule, shape: tuple[int, ...], ways: int) -> Shard | None:
    """The cut of a tensor with these dimensions along `factor`, or None if it does not have the factor."""
    for dim, names in enumerate(dims):
        if factor in names:
            at = names.index(factor)
            outer = math.prod(rule.sizes[name] for name in names[:at])
            unit = math.prod(rule.sizes[name] for name in names[at + 1 :])
            return normal(Shard(dim, outer, unit), shape[dim], ways)
    return None


def cut_factors(layout: Layout, dims: Dims, rule: Rule, shape: tuple[int, ...], mesh: Mesh) -> dict[str, str | None]:
    """For each axis that cuts the value: the factor it cuts, or None where the rule cannot follow the cut."""
    found: dict[str, str | None] = {}
    for axis, place in layout.items():
        if isinstance(place, Shard):
            ways = math.prod(mesh.size(other) for other in shard_axes(layout, place, mesh))
            found[axis] = factor_at(place, dims, rule, shape, ways)
    return found
