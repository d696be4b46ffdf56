"""Between placements and factors: which factor of a rule does a cut fall on, and the other way round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from compiler.ir.graph import Value
from compiler.layout.joined import Pieces, in_pieces, pieces_in
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
            pieces = pieces_in(order)
            shard = Shard(dim, outer, unit, order) if pieces is None else in_pieces(Shard(dim, outer, unit), pieces)
            return normal(shard, shape[dim], ways)
    return None


def nested_cuts(layout: Layout, dims: Dims, rule: Rule, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """The same parts, with axes that cut one factor evenly where the rule has two, as cuts of each: over `a=2, b=4` the
    heads (2 4) may be `S(0)` over both, or over `a`, and `S(0, outer=2)` over `b`."""
    for place in dict.fromkeys(place for place in layout.values() if isinstance(place, Shard)):
        axes = shard_axes(layout, place, mesh)
        ways, before, left = math.prod(mesh.size(axis) for axis in axes), 1, list(axes)
        even = place.unit == 1 and not place.order and shape[place.dim] % (place.outer * ways) == 0
        if not even or len(axes) == 1 or factor_at(place, dims, rule, shape, ways) is not None:
            continue
        for name in dims[place.dim]:
            inside = 1
            while left and before == place.outer and inside * mesh.size(left[0]) <= rule.sizes[name]:
                inside *= mesh.size(left.pop(0))
            if left and 1 < inside == rule.sizes[name]:
                inner = Shard(place.dim, place.outer * inside)
                return nested_cuts(Layout({**layout, **dict.fromkeys(left, inner)}), dims, rule, shape, mesh)
            before *= rule.sizes[name]
    return layout


def pieces_along(factor: str, shard: Shard, dims: Dims, rule: Rule) -> Pieces:
    """The pieces in which `shard` cuts a factor of a value with these dimensions; () if it does not, or with a unit."""
    names, pieces = dims[shard.dim], pieces_in(shard.order)
    if factor not in names or pieces is None or shard.unit != 1:
        return ()
    before = math.prod(rule.sizes[name] for name in names[: names.index(factor)])
    return pieces * (shard.outer // before) if shard.outer % before == 0 else ()


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
    weight is cut along the heads, `"... k, n k -> ... n"` becomes `"... k, (n/0 n/1 n/2) k -> ... (n/0 n/1 n/2)"`. And
    where `n` is `q`, `k` and `v` of one size, one behind the other, `"n -> q, k, v"` becomes `"(n/0 n/u) -> n/u, …"`.
    """
    for k, (value, layout) in enumerate(zip(values, layouts)):
        for place in layout.values():
            if isinstance(place, Shard):
                ways = math.prod(mesh.size(axis) for axis in shard_axes(layout, place, mesh))
                rule = _blocks_at(place, getattr(rule, side)[k][place.dim], rule, side)
                dims = getattr(rule, side)[k]
                if factor_at(place, dims, rule, value.shape, ways) is None:
                    rule = _split_at(place, dims[place.dim], rule, value.shape[place.dim], ways)
    return rule


def _blocks_at(shard: Shard, names: tuple[str, ...], rule: Rule, side: str) -> Rule:
    """The rule with a joined index as so many blocks of one length, if `shard` cuts each of them and its parts are made
    of whole blocks. Operands that are parts of different lengths are each cut by themselves."""
    before = 1
    for name in names:
        count, rest = divmod(shard.outer, before)  # of blocks, in this factor
        for whole, parts in rule.joined.items():
            lengths = [rule.sizes[part] for part in parts]
            alike = len(set(lengths)) == 1 or side == "results"
            cut = name == whole and count > 1 or name in parts and count >= 1 and alike
            block = rule.sizes[name] // max(count, 1)
            even = block > 1 and not any(length % block for length in (rule.sizes[name], *lengths))
            if cut and even and rest == 0:
                return _in_blocks(rule, whole, block)
        before *= rule.sizes[name]
    return rule


def _in_blocks(rule: Rule, whole: str, block: int) -> Rule:
    """The rule with a joined index and its parts as so many blocks each, which are not divided, of what may be cut."""
    every = (whole, *rule.joined[whole])
    rule = replace(rule, joined={name: parts for name, parts in rule.joined.items() if name != whole})
    for name in every:
        sizes = {f"{name}/0": rule.sizes[name] // block, f"{whole}/u": block}
        rule = taken_apart(rule, name, {part: size for part, size in sizes.items() if size != 1})
    return replace(rule, fixed=rule.fixed | {f"{name}/0" for name in every})


def _split_at(shard: Shard, names: tuple[str, ...], rule: Rule, size: int, ways: int) -> Rule:
    """The rule with the factor that `shard` falls inside, if there is one, split into what is outside the cut, what
    is cut, and the unit. A factor that must be whole anyway stays as it is, and one that the operator itself reduces:
    it knows contiguous parts alone."""
    before, whole = 1, rule.solid | rule.collective
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
