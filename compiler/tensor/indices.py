"""Indices: which dimensions of a model count the same thing, and which of these can be divided among ranks.

The output dimension of a projection to `(kv_heads group width)` is three indices in one. Where each goes is followed
from operator to operator by the operators' own rules: a view splits the dimension, attention shares `kv_heads` with
its keys, asks for the whole `width`, and the output projection sums over all three. What comes out is, for each
dimension of a parameter, the indices that it is made of, outermost first:

    wq [(kv_heads group width), dim]    wk [(kv_heads width), dim]    wo [dim, (kv_heads group width)]

with `width` *whole* (some operator needs all of it) and the others free. A dimension is cut along free indices alone;
who cuts an index, cuts it everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from compiler.ir.graph import Graph, Node, Value
from compiler.layout.rule import Dims, Rule, rule_of


class Index:
    """`size` values. `whole`: some operator needs all of them on one rank. `beside`: one that does makes a result that
    can be divided along another index, so that nothing need be gathered if this one is never cut.

    Two indices that turn out to be the same become one, and one that turns out to be several is taken apart:
    `leaves` are what it is now.
    """

    __slots__ = ("size", "whole", "beside", "followed", "into")

    def __init__(self, size: int, followed: bool = False):
        self.size, self.followed = size, followed
        self.whole = self.beside = False
        self.into: tuple[Index, ...] | None = None

    def leaves(self) -> list[Index]:
        if self.into is None:
            return [self] if self.size != 1 else []
        if len(self.into) == 1:
            while self.into[0].into is not None and len(self.into[0].into) == 1:
                self.into = self.into[0].into  # shorten the path for the next who asks
        return [leaf for part in self.into for leaf in part.leaves()]

    def split(self, outer: int) -> None:
        parts = Index(outer, self.followed), Index(self.size // outer, self.followed)
        for part in parts:
            part.whole, part.beside = self.whole, self.beside
        self.into = parts

    def merge(self, other: Index) -> None:
        """`other` is this very index."""
        self.whole |= other.whole
        self.beside |= other.beside
        self.followed |= other.followed
        other.into = (self,)


Indices = tuple[list[Index], ...]
"""For each dimension of a value, its indices."""


def leaves(indices: Iterable[Index]) -> list[Index]:
    return [leaf for index in indices for leaf in index.leaves()]


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
        index.whole = True


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

    def read(dims: Dims) -> Indices:
        return tuple([factors[name] for name in names] for names in dims)

    operands = [(value, dims) for k, (value, dims) in enumerate(zip(node.inputs, rule.operands)) if k not in rule.shape_only]
    results = [(out, dims) for out, dims in zip(node.outputs, rule.results) if out is not None and dims is not None]
    for value, dims in operands:
        for indices, names, size in zip(known.get(value, ()), dims, value.shape):
            if names or size == 1:
                unify(indices, [factors[name] for name in names])
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
    summed = set() if learns else factors.keys() - kept - rule.collective
    asked = {name for name in rule.fixed | summed if name in factors}
    whole = leaves(factors[name] for name in asked)
    for leaf in whole:
        leaf.whole = True
    if any(leaf.followed and not leaf.whole for leaf in leaves(factors[name] for name in kept - asked)):
        for leaf in whole:
            leaf.beside = True
