"""Cuts: the part of a dimension that a rank and a micro-batch hold.

A cut `(dim, axes, outer, count, unit)` sees dimension `dim` as `(outer, count, unit)` and splits `count` over the
product of `axes` (outermost first) into parts of `ceil(count / ways)`; the last parts may be padding. It is written
`"0:dp,micro:1:8:1"`, several joined by `;`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


def positions(
    cuts: Sequence[Cut],
    size: int,
    sizes: Mapping[str, int],
    coords: Mapping[str, int],
    device: torch.device,
    mark_padding: bool = False,
) -> torch.Tensor:
    """The global positions along a dimension of `size` that the part under all its `cuts` holds: int64[local size].

    In padding the last position is repeated, or with `mark_padding` it is -1.
    """
    where = torch.arange(size, device=device)
    # From the innermost factor outwards, so that the outer factors of a cut are still whole when it is applied.
    for cut in sorted(cuts, key=lambda cut: -cut.outer):
        start, length = cut.part(sizes, coords)
        ways = math.prod(sizes[axis] for axis in cut.axes)
        if cut.count % ways == 0:  # whatever is cut inside the parts
            where = where.view(cut.outer, ways, -1)[:, start // length if length else 0].reshape(-1)
            continue
        chosen = torch.arange(start, start + length, device=device)
        padding = chosen >= cut.count
        where = where.view(cut.outer, cut.count, -1)[:, chosen.clamp_(max=max(cut.count - 1, 0))]
        if mark_padding:
            where = where.masked_fill(padding[None, :, None], -1)
        where = where.reshape(-1)
    return where


def local_part(
    tensor: torch.Tensor, cuts: Sequence[Cut], sizes: Mapping[str, int], coords: Mapping[str, int]
) -> torch.Tensor:
    """The part of a global tensor; padding repeats the last real entry."""
    for dim in {cut.dim for cut in cuts}:
        own = [cut for cut in cuts if cut.dim == dim]
        index = positions(own, tensor.shape[dim], sizes, coords, tensor.device)
        tensor = tensor.index_select(dim, index)
    return tensor


@cache
def parse_cuts(text: str) -> tuple[Cut, ...]:
    """The cuts written in `text`; "" is none."""
    cuts = []
    for piece in filter(None, text.split(";")):
        dim, axes, outer, count, unit = piece.split(":")
        cuts.append(Cut(int(dim), tuple(filter(None, axes.split(","))), int(outer), int(count), int(unit)))
    return tuple(cuts)
