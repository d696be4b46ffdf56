"""Placements and layouts.

A layout gives, for each mesh axis, one placement:

| placement | each rank of the axis holds            | the gradient's placement |
|-----------|-----------------------------------------|--------------------------|
| `R`       | the whole value, the same everywhere     | `R`                      |
| `V`       | the whole value, the same everywhere, but used in work that differs: its gradient is still to be summed | `P(sum)` |
| `S(d)`    | one part along dimension d               | `S(d)`                   |
| `P(op)`   | a term; the value is the reduction of all | `V`                     |

The pairing in the last column is what makes differentiation local (compare JAX's varying and unreduced types of
`shard_map`): the transpose of every redistribution follows from it.

A dimension is often a product of factors (a flattened `batch*seq`, a fused `3*heads*head_dim`), and the sharded one
need not be the outermost. `Shard(dim, outer, unit)` sees the dimension as `(outer, count, unit)` and cuts `count`
into `ceil(count / axis size)` long parts; what is missing in the last part is padding.

With `order="zigzag"` there are twice as many chunks as ranks, and rank r of n holds the chunks r and 2n-1-r: of a causal
triangle over the dimension all ranks then have the same area. Zigzag cuts nest as plain ones do: the chunks of the
inner ranks of an outer rank are together just its two.

With `order="4+1+1"` the dimension is several *pieces* of these relative lengths, one behind the other, and a rank holds
its part of each: of a fused projection, heads of the queries, of the keys and of the values. Such cuts nest too. They
divide every piece evenly; pieces of one length are `outer` factors instead, and may be padded (`joined.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runtime.cuts import chunks_each
from runtime.mesh import axis_of


@dataclass(frozen=True, slots=True)
class Replicate:
    """The whole value on every rank."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Varying:
    """The whole value on every rank, its gradient a partial sum."""

    def __str__(self) -> str:
        return "V"


@dataclass(frozen=True, slots=True)
class Partial:
    """A term of a reduction: "sum", "max" or "min"."""

    op: str = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


@dataclass(frozen=True, slots=True)
class Shard:
    """A part along `dim`, seen as (outer, count, unit) with `count` cut over the axis; `order`: "", "zigzag" or the
    relative lengths of pieces, "4+1+1"."""

    dim: int
    outer: int = 1
    unit: int = 1
    order: str = ""

    def __str__(self) -> str:
        extra = f", outer={self.outer}" if self.outer != 1 else ""
        extra += f", unit={self.unit}" if self.unit != 1 else ""
        extra += f", {self.order}" if self.order else ""
        return f"S({self.dim}{extra})"

    def at(self, dim: int) -> Shard:
        return Shard(dim, self.outer, self.unit, self.order)

    def chunks(self, ways: int) -> int:
        """How many chunks `ways` ranks cut the dimension into."""
        return ways * chunks_each(self.order, ways)


Placement = Replicate | Varying | Partial | Shard
R, V, P = Replicate(), Varying(), Partial()


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes, outermost first. The micro-batch axis, if any, is in time, not over ranks.

    An axis of the plan may be split into *sub-axes*, where not all of it can do the same: `tp=8` with two key/value
    heads is `tp.0=2`, which cuts them, and `tp.1=4`, over which they are replicated. A sub-axis is an axis like any
    other; only who speaks of the plan's axis asks for its `parts`.
    """

    axes: tuple[tuple[str, int], ...]

    def size(self, axis: str) -> int:
        return dict(self.axes)[axis]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    def without(self, axis: str) -> Mesh:
        return Mesh(tuple(item for item in self.axes if item[0] != axis))

    def parts(self, *axes: str) -> tuple[str, ...]:
        """The axes of this mesh that these axes of the plan are made of, in the order of the mesh; those of one rank,
        which a mesh may leave out, have none."""
        return tuple(name for name in self.names if axis_of(name) in axes)

    def split(self, sizes: Mapping[str, tuple[int, ...]]) -> Mesh:
        """The mesh with axes split into sub-axes of these sizes, outermost first; one size alone changes nothing."""
        found: list[tuple[str, int]] = []
        for axis, size in self.axes:
            parts = sizes.get(axis, (size,))
            if math.prod(parts) != size:
                raise ValueError(f"{parts} do not make {axis}={size}")
            found += [(f"{axis}.{k}", part) for k, part in enumerate(parts)] if len(parts) > 1 else [(axis, size)]
        return Mesh(tuple(found))


class Layout(Mapping[str, Placement]):
    """Immutable map from mesh axis to placement; an axis that is not named is `R`. Iterates over the axes not `R`."""

    __slots__ = ("_placements", "_hash")

    def __init__(self, placements: Mapping[str, Placement] | Iterable[tuple[str, Placement]] = ()):
        items = placements.items() if isinstance(placements, Mapping) else placements
        self._placements = {axis: place for axis, place in items if place != R}
        self._hash = hash(frozenset(self._placements.items()))

    def __getitem__(self, axis: str) -> Placement:
        return self._placements.get(axis, R)

    def __iter__(self):
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)

    def __contains__(self, axis: object) -> bool:
        return axis in self._placements

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._placements == other._placements

    def with_(self, axis: str, place: Placement) -> Layout:
        return Layout({**self._placements, axis: place})

    def __str__(self) -> str:
        return "{" + ", ".join(f"{axis}: {place}" for axis, place in self._placements.items()) + "}"

    __repr__ = __str__


def parse_placement(text: str) -> Placement:
    """The inverse of `str(placement)`; raises ValueError."""
    text = text.strip()
    if text == "R":
        return R
    if text == "V":
        return V
    if text == "P":
        return P
    if match := re.fullmatch(r"P\((\w+)\)", text):
        return Partial(match[1])
    if match := re.fullmatch(r"S\((\d+)(?:, outer=(\d+))?(?:, unit=(\d+))?(?:, (zigzag|[\d+]+))?\)", text):
        return Shard(int(match[1]), int(match[2] or 1), int(match[3] or 1), match[4] or "")
    raise ValueError(f"not a placement: {text!r}")


def transpose(place: Placement) -> Placement:
    """The placement of the gradient of a value placed so."""
    if isinstance(place, Varying):
        return P
    if isinstance(place, Partial):
        return V
    return place


def shard_axes(layout: Layout, shard: Shard, mesh: Mesh) -> tuple[str, ...]:
    """The axes that cut the same factor as `shard`, outermost first."""
    return tuple(axis for axis in mesh.names if layout[axis] == shard)


def normal(shard: Shard, size: int, ways: int) -> Shard:
    """The one spelling of a cut: a unit that divides evenly is folded away, so that equal cuts compare equal."""
    if shard.unit > 1 and (size // (shard.outer * shard.unit)) % shard.chunks(ways) == 0:
        return Shard(shard.dim, shard.outer, order=shard.order)
    return shard


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape of one rank's part, padding included (equal on all ranks).

    Axes that cut the same factor cut it together: `ceil(count / product of their sizes)`. Different factors of one
    dimension are cut each by itself. All axes that cut one factor do so in the same order.
    """
    cuts: dict[Shard, int] = {}
    for axis, place in layout.items():
        if isinstance(place, Shard):
            cuts[place] = cuts.get(place, 1) * mesh.size(axis)
    local = list(shape)
    for shard, ways in cuts.items():
        count = shape[shard.dim] // (shard.outer * shard.unit)
        # The dimension may be cut at another factor too, so scale what is left of it.
        chunks = shard.chunks(ways)
        part = math.ceil(count / chunks) * (chunks // ways)
        local[shard.dim] = local[shard.dim] * part // count if count else 0
    return tuple(local)


def is_padded(shape: tuple[int, ...], layout: Layout, shard: Shard, mesh: Mesh) -> bool:
    """Whether the last chunk along `shard` is shorter than the others."""
    ways = math.prod(mesh.size(axis) for axis in shard_axes(layout, shard, mesh))
    return (shape[shard.dim] // (shard.outer * shard.unit)) % shard.chunks(ways) != 0
