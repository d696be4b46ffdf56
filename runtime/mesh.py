"""The device mesh: named axes over the ranks of a job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

TIME = "micro"
"""The axis of micro-batches: in time, not over ranks."""


def axis_of(name: str) -> str:
    """The axis of the plan that an axis of the mesh is (a part of): "tp" of "tp.0", and of "tp"."""
    return name.partition(".")[0]


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes, outermost first.

    Ranks are laid out row-major: the last axis varies fastest, so `Mesh((("dp", 2), ("tp", 2)))` places ranks 0 and 1
    in one tp group. An axis may have size 1; a mesh without axes has one rank.

    Raises ValueError for a repeated name or a size below 1.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise ValueError(f"mesh axes must have distinct names, got {names}")
        for name, size in self.axes:
            if size < 1:
                raise ValueError(f"mesh axis {name!r} must have size 1 or more, got {size}")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    def axis(self, name: str) -> int:
        """The size of one axis; KeyError with the known names if there is none of that name."""
        for candidate, size in self.axes:
            if candidate == name:
                return size
        raise KeyError(f"no mesh axis {name!r}; the axes are {', '.join(self.names) or 'none'}")

    def coords(self, rank: int) -> dict[str, int]:
        """The rank's coordinate on each axis, in mesh order."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a mesh of {self.size}")
        coords: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, coords[name] = divmod(rank, size)
        return dict(reversed(coords.items()))

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at these coordinates, which must name every axis and no other."""
        if set(coords) != set(self.names):
            raise ValueError(f"coordinates name {sorted(coords)}, the mesh has {sorted(self.names)}")
        rank = 0
        for name, size in self.axes:
            if not 0 <= coords[name] < size:
                raise ValueError(f"coordinate {name}={coords[name]} is outside axis {name}={size}")
            rank = rank * size + coords[name]
        return rank

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only on `axes`, itself included.

        Ordered row-major by the axes in *mesh* order, whatever the order of `axes`: a set of axes means one group.
        No axes, or axes of size 1, give `(rank,)`.
        """
        for name in axes:
            self.axis(name)
        here, members = self.coords(rank), [0]
        for name, size in self.axes:
            places = range(size) if name in axes else (here[name],)
            members = [outer * size + place for outer in members for place in places]
        return tuple(members)

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups over `axes`, ordered by their first rank; together they hold each rank once."""
        members = self.group(0, axes)
        others = self.group(0, tuple(name for name in self.names if name not in axes))
        return tuple(tuple(first + member for member in members) for first in others)
