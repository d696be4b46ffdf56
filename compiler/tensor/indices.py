"""Indices: which dimensions of a model count the same thing, and which of these can be divided among ranks.

The output dimension of a projection to `(kv_heads group width)` is three indices in one. Where each goes is followed
from operator to operator by the operators' own rules: a view splits the dimension, attention shares `kv_heads` with
its keys, asks for the whole `width`, and the output projection sums over all three. What comes out is, for each
dimension of a parameter, the indices that it is made of, outermost first:

    wq [(kv_heads group width), dim]    wk [(kv_heads width), dim]    wo [dim, (kv_heads group width)]

with `width` *whole* (some operator needs all of it) and the others free. A dimension is cut along free indices alone;
who cuts an index, cuts it everywhere.

That of a fused projection is several *parts*, one behind the other, as `split` or `slice` takes them apart, and each of
them is indices of its own:

    wqkv [(kv_heads group width) + (kv_heads width) + (kv_heads width), dim]
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from compiler.ir.graph import Graph, Node, Value
from compiler.layout.rule import Dims, Rule, rule_of


class Index:
    """`size` values. `whole`: some operator needs all of them on one rank. `beside`: one that does makes a result that
    can be divided along another index, so that nothing need be gathered if this one is never cut.

    Two indices that turn out to be the same become one, and one that turns out to be a product of several is taken
    apart: `leaves` are what it is now. A leaf may have `parts`, one behind the other, which are indices themselves.
    """

    __slots__ = ("size", "whole", "beside", "followed", "into", "parts")

    def __init__(self, size: int, followed: bool = False, parts: tuple[Index, ...] = ()):
        self.size, self.followed, self.parts = size, followed, parts
        self.whole = self.beside = False
        self.into: tuple[Index, ...] | None = None

    def leaves(self) -> list[Index]:
        if self.into is None:
            return [self] if self.size != 1 else []
        if len(self.into) == 1:
            while self.into[0].into is not None and len(self.into[0].into) == 1:
                self.into = self.into[0].into  # shorten the path for the next who asks
        return [leaf for part in self.into for leaf in part.leaves()]

    @property
    def is_free(self) -> bool:
        """Whether it can be cut. (Inside of another index, parts cannot.)"""
        return not self.whole and not self.parts

    @property
    def is_beside(self) -> bool:
        return self.beside or bool(self.parts) and all(leaf.is_beside for leaf in leaves(self.parts))

    def split(self, outer: int) -> None:
        """Take it apart as a product. Of one with parts, each is; where that cannot be, they are forgotten and whole."""
        inner = self.size // outer
        pair = Index(outer, self.followed), Index(inner, self.followed)
        for index in pair:
            index.whole, index.beside = self.whole, self.beside
        if all(part.size % inner == 0 for part in self.parts):
            pair[0].parts = tuple(Index(part.size // inner, self.followed) for part in self.parts)
            for part, over in zip(self.parts, pair[0].parts):
                unify([part], [over, pair[1]])
        else:
            self.need()
            pair[0].whole = pair[1].whole = True
        self.into = pair

    def cleave(self, first: int) -> None:
        """Take a leaf apart as two, one behind the other."""
        self.parts = Index(first, self.followed), Index(self.size - first, self.followed)
        if self.whole:
            self.need()

    def need(self, beside: bool = False) -> None:
        """Some operator needs all of it, and of its parts."""
        self.whole = True
        self.beside |= beside
        for leaf in leaves(self.parts):
            leaf.need(self.beside)

    def merge(self, other: Index) -> None:
        """`other` is this very index."""
        whole = self.whole or other.whole
        self.beside |= other.beside
        self.followed |= other.followed
        other.into = (self,)
        if self.parts and other.parts:
            align(self.parts, other.parts)
        self.parts = self.parts or other.parts
        if whole:
            self.need()


Indices = tuple[list[Index], ...]
"""For each dimension of a value, its indices."""


def leaves(indices: Iterable[Index]) -> list[Index]:
    return [leaf for index in indices for leaf in index.leaves()]


def by_parts(indices: Sequence[Index], ways: int = 1) -> list[list[Index]]:
    """The indices of each part of a dimension with these, which has but one if the outermost has no parts. Those of which
    none can be cut are one where they do not divide in so many ways."""
    if not indices or not indices[0].parts:
        return [list(indices)]
    first, *rest = indices
    found = [part for each in first.parts for part in by_parts([*each.leaves(), *rest], ways)]
    free = any(index.is_free for part in found for index in part)
    return found if free or all(length(part) % ways == 0 for part in found) else [list(indices)]


def length(indices: Iterable[Index]) -> int:
    return math.prod(index.size for index in indices)


def unify(left: Iterable[Index], right: Iterable[Index]) -> None:
    """Two readings of one dimension: take both apart until they agree. What has no common factors must be whole."""
    one, other = deque(leaves(left)), deque(leaves(right))
    while one and other:
        a, b = one[0], other[0]
        if a.into is not None or b.into is not None:  # by what happened further out
            for side in (one, other):
                side.extendleft(reversed(side.popleft().leaves()))
        elif a is b or a.size == b.size:
            if a is not b:
                a.merge(b)
            one.popleft()
            other.popleft()
        elif a.size % b.size == 0:
            a.split(b.size)
        elif b.size % a.size == 0:
            b.split(a.size)
        else:
            break
    for index in leaves([*one, *other]):
        index.need()


def align(left: Iterable[Index], right: Iterable[Index]) -> None:
    """Two readings of one index as parts: the same, once those of both that have others inside are taken apart. What is
    a product cannot be: it is whole."""
    one, other = deque(flat(left)), deque(flat(right))
    while one and other:
        a, b = one[0], other[0]
        if a.size == b.size:
            unify([one.popleft()], [other.popleft()])
            continue
        side, length = (one, b.size) if a.size > b.size else (other, a.size)
        (longer, *more) = leaves([side[0]])
        if more or longer.size != side[0].size:
            break
        longer.cleave(length)
        side.popleft()
        side.extendleft(reversed(longer.parts))
    for index in leaves([*one, *other]):
        index.need()


def flat(parts: Iterable[Index]) -> Iterator[Index]:
    """Parts that are parts themselves, as these."""
    for part in parts:
        found = part.leaves()
        inside = found[0].parts if len(found) == 1 and found[0].size == part.size else ()
        yield from flat(inside) if inside else (part,)


def follow(graph: Graph, seeds: Mapping[Value, Collection[int]]) -> dict[Value, Indices]:
    """The indices of every value that the dimensions `seeds[parameter]` reach, themselves included."""
    known: dict[Value, Indices] = {
        value: tuple([Index(size, followed=k in dims)] for k, size in enumerate(value.shape))
        for value, dims in seeds.items()
    }
    weights = {value for value in graph.inputs if value.kind == "param"}
    for node in graph.nodes:
        rule = rule_of(node)
        if rule.cheap and node.inputs and all(value in weights for value in node.inputs):
            weights.update(out for out in node.outputs if out is not None)
        if any(value in known for value in node.inputs):
            _visit(node, rule, known, weights)
    return known


def _visit(node: Node, rule: Rule, known: dict[Value, Indices], weights: set[Value]) -> None:
    factors = {name: Index(size) for name, size in rule.sizes.items()}
    for whole, parts in rule.joined.items():
        if len(parts) > 1:
            factors[whole].parts = tuple(factors[part] for part in parts)
        else:
            factors[whole].merge(factors[parts[0]])

    def read(dims: Dims) -> Indices:
        return tuple([factors[name] for name in names] for names in dims)

    operands = [(value, dims) for k, (value, dims) in enumerate(zip(node.inputs, rule.operands)) if k not in rule.shape_only]
    results = [(out, dims) for out, dims in zip(node.outputs, rule.results) if out is not None and dims is not None]
    for value, dims in operands:
        for indices, names, size in zip(known.get(value, ()), dims, value.shape):
            if names or size == 1:
                unify(indices, [factors[name] for name in names])
    for whole, parts in rule.joined.items():
        if any(leaf.followed for name in (whole, *parts) for leaf in factors[name].leaves()):
            for leaf in leaves(factors[name] for name in (whole, *parts)):
                leaf.followed = True
    _mark_whole(node, rule, factors, results, weights)
    for value, dims in [*operands, *results]:
        follows = any(leaf.followed for names in dims for name in names for leaf in factors[name].leaves())
        if follows and value not in known and (value.producer is None or any(value is out for out, _ in results)):
            known[value] = read(dims)


def _mark_whole(
    node: Node,
    rule: Rule,
    factors: Mapping[str, Index],
    results: list[tuple[Value, Dims]],
    weights: set[Value],
) -> None:
    """An operator needs whole what its rule says, and what it sums over without a weight: the terms would have to be
    added up where a layer in rows has its one sum already."""
    kept = {name for _, dims in results for names in dims for name in names}
    learns = any(value in weights for value in node.inputs)
    summed = set() if learns else factors.keys() - kept - rule.collective - (rule.solid - rule.fixed)
    asked = {name for name in rule.fixed | summed if name in factors}
    needed = leaves(factors[name] for name in asked)
    for leaf in needed:
        leaf.need()
    if any(leaf.followed and not leaf.whole for leaf in leaves(factors[name] for name in kept - asked)):
        for leaf in needed:
            leaf.need(beside=True)
