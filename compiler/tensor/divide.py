"""Dividing indices among the ranks of an axis, which may split the axis into sub-axes.

A run of free indices, say the `(kv_heads group)` of a query projection with 2 key/value heads of 4 query heads each, is
divided among 8 ranks as 2 x 4: the key/value heads are cut over the outer sub-axis, and what lacks the other index (the
keys) is replicated over the inner one. Of all ways to divide, the one with the smallest largest part is taken; of equal
ones that which cuts the outermost index into most parts, since then the least is replicated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from compiler.layout.placement import Mesh
from compiler.tensor.indices import Index

Span = tuple[int, int]
"""Of the ranks in row-major order: `(outer, ways)` cuts into `ways` inside each of `outer` parts."""


class Division:
    """How indices are divided among the ranks of `axes`, which together have `ways`."""

    def __init__(self, mesh: Mesh, axes: Sequence[str]):
        self.axes = {axis: mesh.size(axis) for axis in axes}
        self.ways = math.prod(self.axes.values())
        self.spans: dict[Index, Span] = {}
        # Where one sub-axis ends and the next begins, as products of sizes from outside. Each divides the next.
        self.edges = list(itertools.accumulate(self.axes.values(), lambda a, b: a * b, initial=1))

    def divide(self, run: Sequence[Index]) -> None:
        """Decide for the indices of a run, unless a longer run has: what is cut once is cut so everywhere."""
        if not run or any(index in self.spans for index in run):
            return
        factors = min(self.fitting(len(run)), key=lambda each: (largest_part(run, each), [-ways for ways in each]))
        outer = 1
        for index, ways in zip(run, factors):
            self.spans[index] = (outer, ways)
            outer *= ways
            if outer not in self.edges:
                self.edges = sorted((*self.edges, outer))

    def fitting(self, count: int) -> Iterator[tuple[int, ...]]:
        """All ways to write the number of ranks as a product of `count` numbers that fit between the edges so far."""
        for factors in products(self.ways, count):
            edges = itertools.accumulate(factors, lambda a, b: a * b, initial=1)
            if all(max(a, b) % min(a, b) == 0 for a in edges for b in self.edges):
                yield factors

    def sub_axes(self) -> Mapping[str, tuple[int, ...]]:
        """For each axis the sizes of the sub-axes that it is to be split into."""
        sizes: dict[str, tuple[int, ...]] = {}
        outer = 1
        for axis, size in self.axes.items():
            inside = [edge for edge in self.edges if outer <= edge <= outer * size]
            sizes[axis] = tuple(b // a for a, b in itertools.pairwise(inside))
            outer *= size
        return sizes

    def cut_by(self, index: Index, mesh: Mesh) -> tuple[str, ...]:
        """The axes of the split mesh that cut an index."""
        first, ways = self.spans.get(index, (1, 1))
        found, outer = [], 1
        for axis in mesh.parts(*self.axes):
            if first <= outer < first * ways:
                found.append(axis)
            outer *= mesh.size(axis)
        return tuple(found)


def products(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `number` as a product of `count` numbers.

    >>> list(products(4, 2))
    [(1, 4), (2, 2), (4, 1)]
    """
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in products(number // first, count - 1))


def largest_part(run: Iterable[Index], factors: Iterable[int]) -> int:
    return math.prod(math.ceil(index.size / ways) for index, ways in zip(run, factors))
