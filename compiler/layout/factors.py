"""Between placements and factors: which factor of a rule does a cut fall on, and the other way round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from compiler.ir.graph import Value
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
            whole_units = rule.sizes[name] % shard.chunks(ways) == 0
            return name if shard.unit == after or (shard.unit == 1 and whole_units) else None
        before *= rule.sizes[name]
    return None


def shard_for(
    factor: str, dims: Dims, rule: Rule, shape: tuple[int, ...], ways: int, order: str = ""
) -> Shard | None:
    """The cut of a tensor with these dimensions along `factor`, or None if it does not have the factor."""
    for dim, names in enumerate(dims):
        if factor in names:
            at = names.index(factor)
            outer = math.prod(rule.sizes[name] for name in names[:at])
            unit = math.prod(rule.sizes[name] for name in names[at + 1 :])
            return normal(Shard(dim, outer, unit, order), shape[dim], ways)
    return None


def cut_factors(layout: Layout, dims: Dims, rule: Rule, shape: tuple[int, ...], mesh: Mesh) -> dict[str, str | None]:
    """For each axis that cuts the value: the factor it cuts, or None where the rule cannot follow the cut."""
    found: dict[str, str | None] = {}
    for axis, place in layout.items():
        if isinstance(place, Shard):
            ways = math.prod(mesh.size(other) for other in shard_axes(layout, place, mesh))
            found[axis] = factor_at(place, dims, rule, shape, ways)
    return found


def refined(
    rule: Rule, values: Sequence[Value], layouts: Iterable[Layout], mesh: Mesh, side: str = "operands"
) -> Rule:
    """The rule with factors taken apart where one of these operands (or, `side`, results) is cut inside them.

    An index may always be read as several. Where `n` counts the `(3 heads width)` of a fused projection and the
    weight is cut along the heads, `"... k, n k -> ... n"` becomes `"... k, (n/0 n/1 n/2) k -> ... (n/0 n/1 n/2)"`.
    """
    for k, (value, layout) in enumerate(zip(values, layouts)):
        for place in layout.values():
            if isinstance(place, Shard):
                ways = math.prod(mesh.size(axis) for axis in shard_axes(layout, place, mesh))
                dims = getattr(rule, side)[k]
                if factor_at(place, dims, rule, value.shape, ways) is None:
                    rule = _split_at(place, dims[place.dim], rule, value.shape[place.dim], ways)
    return rule


def _split_at(shard: Shard, names: tuple[str, ...], rule: Rule, size: int, ways: int) -> Rule:
    """The rule with the factor that `shard` falls inside, if there is one, split into what is outside the cut, what
    is cut, and the unit. A factor that must be whole anyway stays as it is, and one that the operator itself reduces:
    it knows contiguous parts alone."""
    before, whole = 1, rule.fixed | rule.collective
    for name in names:
        after = before * rule.sizes[name]
        # A unit of 1 may be one that was folded away, since the parts are even: then they may end with the factor.
        end = after if shard.unit == 1 and after % (shard.outer * shard.chunks(ways)) == 0 else size // shard.unit
        if shard.outer % before == 0 and after % end == 0 and end > shard.outer and name not in whole:
            sizes = (shard.outer // before, end // shard.outer, after // end)
            return taken_apart(rule, name, {f"{name}/{k}": part for k, part in enumerate(sizes) if part != 1})
        before = after
    return rule


def innermost(factor: str, rule: Rule) -> str:
    """The factor itself, or the innermost of the parts that it was taken apart into."""
    return next(name for name in reversed(rule.sizes) if name == factor or name.startswith(f"{factor}/"))


def taken_apart(rule: Rule, factor: str, parts: dict[str, int]) -> Rule:
    """The rule with a factor as the product of several, outermost first."""

    def split(dims: Dims) -> Dims:
        return tuple(
            tuple(part for name in names for part in (parts if name == factor else (name,))) for names in dims
        )

    return replace(
        rule,
        operands=tuple(map(split, rule.operands)),
        results=tuple(None if dims is None else split(dims) for dims in rule.results),
        sizes={**{name: size for name, size in rule.sizes.items() if name != factor}, **parts},
        reduces={**rule.reduces, **{name: rule.reduces[factor] for name in parts if factor in rule.reduces}},
    )
