"""Where a weight is used, and so in which ways it can be cut.

A weight may pass through operators that only move its elements or cast them (`t`, `view`, a cast) before an operator
calculates with it. The factors of that operator's rule that the weight has are the ways to cut it:

    vocab    of a table the rows that are looked up; of a projection its outputs, if a loss takes them in parts
    column   a factor of the result that no other operand has: each rank makes some of the outputs
    row      a factor that is summed over: each rank adds a term

What an operand shares with the result and with another operand (a bias, the weight of a normalisation) has no way of
its own: it follows what it is combined with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from compiler.ir.graph import Node, Value
from compiler.layout.rule import Dims, Rule, rule_of

Users = Mapping[Value, Sequence[Node]]


@dataclass(frozen=True)
class Way:
    """A style, and the dimension of the weight that it cuts."""

    style: str
    dim: int


@dataclass(frozen=True)
class Use:
    """An operator that calculates with a weight, its operand k. `dims` are those of the weight that the operand's
    dimensions are, None where it is not just one."""

    node: Node
    k: int
    dims: tuple[int | None, ...]


def uses(weight: Value, users: Users) -> Iterator[Use]:
    """The operators that calculate with the weight, in order."""
    reached: list[tuple[Value, tuple[int | None, ...]]] = [(weight, tuple(range(len(weight.shape))))]
    for value, dims in reached:
        for node in users.get(value, ()):
            rule = rule_of(node)
            k = next(k for k, operand in enumerate(node.inputs) if operand is value)
            if rule.cheap and len(node.inputs) == 1:
                for out, after in zip(node.outputs, rule.results):
                    if out is not None and after is not None:
                        reached.append((out, moved(dims, rule, rule.operands[k], after)))
            elif k not in rule.shape_only:
                yield Use(node, k, dims)


def moved(dims: Sequence[int | None], rule: Rule, before: Dims, after: Dims) -> tuple[int | None, ...]:
    """Which dimension each dimension of a result is, or is a part of, given those of the operand."""
    at = {names: dim for names, dim in zip(before, dims) if names}
    at |= {(part,): at[whole,] for whole, parts in rule.joined.items() if (whole,) in at for part in parts}
    return tuple(at.get(names) for names in after)


def ways(weight: Value, users: Users) -> tuple[Way, ...]:
    """How the weight can be cut: by the first operator that calculates with it in a way that has one."""
    for use in uses(weight, users):
        found = [way for factor, dim in _factors(use) if (way := _way(use, factor, dim, users)) is not None]
        if found:
            return tuple(dict.fromkeys(found))
    return ()


def _factors(use: Use) -> Iterator[tuple[str, int]]:
    """The factors along which the operand may be cut, and the weight's dimension that each is (the outermost) part of."""
    rule = rule_of(use.node)
    for names, dim in zip(rule.operands[use.k], use.dims):
        for name in names:
            if dim is not None and name not in rule.solid and rule.sizes[name] > 1:
                yield name, dim


def _way(use: Use, factor: str, dim: int, users: Users) -> Way | None:
    rule = rule_of(use.node)
    if use.k in rule.addends:
        return None
    elsewhere = any(_has(dims, factor) for k, dims in enumerate(rule.operands) if k != use.k and k not in rule.addends)
    in_result = next((j for j, dims in enumerate(rule.results) if dims is not None and _has(dims, factor)), None)
    if in_result is None:
        # What is summed is a product with another operand, or else rows of a table of which one is taken.
        return Way("row" if elsewhere else "vocab", dim) if rule.linear else None
    if elsewhere:
        return None
    return Way("vocab" if exchanged_later(use.node, in_result, factor, rule, users) else "column", dim)


def exchanged_later(node: Node, result: int, factor: str, rule: Rule, users: Users) -> bool:
    """Whether the factor's dimension of a result comes to an operator that reduces it in parts by itself (a loss over a
    vocabulary), through operators that keep the dimension."""
    dims = rule.results[result]
    out = node.outputs[result]
    assert dims is not None
    if out is None:
        return False
    reached = [(out, next(d for d, names in enumerate(dims) if factor in names))]
    known = set(reached)  # residual connections lead to a value along many paths
    for value, dim in reached:
        for user in users.get(value, ()):
            rule = rule_of(user)
            k = next(k for k, operand in enumerate(user.inputs) if operand is value)
            names = rule.operands[k][dim] if k not in rule.shape_only else ()
            if rule.collective.intersection(names):
                return True
            for after, result_dims in zip(user.outputs, rule.results):
                if after is not None and result_dims is not None and names in result_dims and names:
                    place = (after, result_dims.index(names))
                    if place not in known:
                        known.add(place)
                        reached.append(place)
    return False


def _has(dims: Dims, factor: str) -> bool:
    return any(factor in names for names in dims)


SIBLINGS = {"column": "vocab", "vocab": "column"}
"""Of a projection that has but one of them, the outputs are what either means."""


def way_of(style: str, found: Sequence[Way]) -> Way | None:
    """The way that a style asks for."""
    wanted = (style, SIBLINGS.get(style))
    return next((way for name in wanted for way in found if way.style == name), None)


def style_dim(style: str, value: Value, users: Users) -> int | None:
    """The dimension of a parameter that a style cuts; of a bias that of its layer's outputs, unless they are summed."""
    way = way_of(style, ways(value, users))
    if way is not None or style == "row":
        return way.dim if way is not None else None
    for use in uses(value, users):
        rule = rule_of(use.node)
        if use.k in rule.addends:
            kept = {name for dims in rule.results if dims is not None for names in dims for name in names}
            return next((dim for factor, dim in _factors(use) if factor in kept), None)
    return None
