"""Cuts: the part of a dimension that a rank and a micro-batch hold.

A cut `(dim, axes, outer, count, unit)` sees dimension `dim` as `(outer, count, unit)` and splits `count` over the
product of `axes` (outermost first) into parts of `ceil(count / ways)`; the last parts may be padding. It is written
`"0:dp,micro:1:8:1"`, several joined by `;`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Cut:
    dim: int
    axes: tuple[str, ...]
    outer: int
    count: int
    unit: int

    def __str__(self) -> str:
        return f"{self.dim}:{','.join(self.axes)}:{self.outer}:{self.count}:{self.unit}"

    def part(self, sizes: Mapping[str, int], coords: Mapping[str, int]) -> tuple[int, int]:
        """(start, length) of this part in units; start + length may exceed `count` by padding."""
        ways, index = 1, 0
        for axis in self.axes:
            ways *= sizes[axis]
            index = index * sizes[axis] + coords[axis]
        length = math.ceil(self.count / ways)
        return index * length, length

    def index(self, sizes: Mapping[str, int], coords: Mapping[str, int], device: torch.device | None = None):
        """The global positions along the dimension that this part holds, padding clamped: int64[local size]."""
        start, length = self.part(sizes, coords)
        where = torch.arange(start, start + length, device=device).clamp_(max=max(self.count - 1, 0))
        outer = torch.arange(self.outer, device=device)[:, None, None] * (self.count * self.unit)
        unit = torch.arange(self.unit, device=device)
        return (outer + where[None, :, None] * self.unit + unit).reshape(-1)


@cache
def parse_cuts(text: str) -> tuple[Cut, ...]:
    """The cuts written in `text`; "" is none."""
    cuts = []
    for piece in filter(None, text.split(";")):
        dim, axes, outer, count, unit = piece.split(":")
        cuts.append(Cut(int(dim), tuple(filter(None, axes.split(","))), int(outer), int(count), int(unit)))
    return tuple(cuts)
