"""Cuts: the part of a dimension that a rank and a micro-batch hold.

A cut `(dim, axes, outer, count, unit)` sees dimension `dim` as `(outer, count, unit)` and splits `count` over the
product of `axes` (outermost first) into parts of `ceil(count / ways)`; the last parts may be padding. It is written
`"0:dp,micro:1:8:1"`, several joined by `;`.

An `order` says that a rank holds several chunks, all of one length, and which. In the order "zigzag"
(`"1:cp:1:8:1:zigzag"`) there are two for each of n ranks, and rank r holds the chunks r and 2n-1-r. In the order "4+1+1"
(`"0:tp:1:48:8:4+1+1"`) the dimension is several pieces one behind the other, of these lengths in relation to each other,
and a rank holds its part of each: of two ranks, the second has the positions [16, 32), [36, 40) and [44, 48) of 48. Pieces
of different lengths divide evenly, so that they need no padding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    dim: int
    axes: tuple[str, ...]
    outer: int
    count: int
    unit: int
    order: str = ""

    def __str__(self) -> str:
        order = f":{self.order}" if self.order else ""
        return f"{self.dim}:{','.join(self.axes)}:{self.outer}:{self.count}:{self.unit}{order}"

    def ways(self, sizes: Mapping[str, int]) -> int:
        return math.prod(sizes[axis] for axis in self.axes)

    def index(self, sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
        """This rank's number among those that share the dimension."""
        index = 0
        for axis in self.axes:
            index = index * sizes[axis] + coords[axis]
        return index

    def part(self, sizes: Mapping[str, int], coords: Mapping[str, int]) -> tuple[int, int]:
        """(start, length) of this part in units; start + length may exceed `count` by padding. Of a contiguous cut."""
        ((start, length),) = self.spans(sizes, coords)
        return start, length

    def spans(self, sizes: Mapping[str, int], coords: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """(start, length) of each run of chunks of this part, in the order in which they are held."""
        ways, index = self.ways(sizes), self.index(sizes, coords)
        chunk = self.chunk(ways)
        return tuple((first * chunk, number * chunk) for first, number in self.held(index, ways))

    def held(self, index: int, ways: int) -> tuple[tuple[int, int], ...]:
        """(number of the first, how many) of each run of chunks that rank `index` holds."""
        if self.order == "zigzag" and ways > 1:
            return (index, 1), (2 * ways - 1 - index, 1)
        if self.order and ways > 1:
            lengths = piece_lengths(self.order)
            before = itertools.accumulate(lengths, initial=0)
            return tuple((start * ways + index * length, length) for start, length in zip(before, lengths))
        return ((index, 1),)

    def each(self, ways: int) -> int:
        """How many chunks a rank holds."""
        return chunks_each(self.order, ways)

    def chunk(self, ways: int) -> int:
        """The length of a chunk in units."""
        chunks = ways * self.each(ways)
        if "+" in self.order and self.count % chunks:
            raise ValueError(f"the pieces of {self} do not divide among {ways} ranks")
        return math.ceil(self.count / chunks)

    def length(self, ways: int) -> int:
        """The length of a part in units."""
        return self.each(ways) * self.chunk(ways)


def chunks_each(order: str, ways: int) -> int:
    """How many chunks each of `ways` ranks holds in this order."""
    if not order or ways == 1:
        return 1
    return 2 if order == "zigzag" else sum(piece_lengths(order))


@cache
def piece_lengths(order: str) -> tuple[int, ...]:
    """The lengths of pieces in relation to each other, as "4+1+1" has them."""
    return tuple(map(int, order.split("+")))


# -- the parts of a tensor ---------------------------------------------------------------------------------------------


def split_parts(x: Tensor, cut: Cut, ways: int, zeros: bool = False) -> Tensor:
    """All parts of a whole tensor: [ways, …]. Padding repeats the last entry, or holds `zeros`."""
    chunk, per, dim = cut.chunk(ways), cut.each(ways), cut.dim + 1
    split = x.unflatten(cut.dim, (cut.outer, cut.count, cut.unit))
    missing = chunk * per * ways - cut.count
    if missing:
        last = split.narrow(dim, cut.count - 1, 1)
        sizes = [missing if k == dim else -1 for k in range(split.dim())]
        pad = (torch.zeros_like(last) if zeros else last).expand(sizes)
        split = torch.cat([split, pad], dim)
    if per > 1:
        runs = [run for index in range(ways) for run in cut.held(index, ways)]
        split = torch.cat([split.narrow(dim, first * chunk, number * chunk) for first, number in runs], dim)
    split = split.unflatten(dim, (ways, per * chunk))
    return split.movedim(dim, 0).flatten(dim, dim + 2).contiguous()


def join_parts(parts: Tensor, cut: Cut) -> Tensor:
    """The inverse of `split_parts`: [ways, …, outer*length*unit, …] → […, outer*count*unit, …]."""
    ways, shape, dim = parts.shape[0], parts.shape[1:], cut.dim
    chunk, per = cut.chunk(ways), cut.each(ways)
    split = parts.view(ways, *shape[:dim], cut.outer, per * chunk, cut.unit, *shape[dim + 1 :])
    split = split.movedim(0, dim + 1).flatten(dim + 1, dim + 2)
    if per > 1:
        runs = [run for index in range(ways) for run in cut.held(index, ways)]
        ends = itertools.accumulate(number for _, number in runs)
        there = sorted((first, end - number, number) for (first, number), end in zip(runs, ends))
        split = torch.cat([split.narrow(dim + 1, at * chunk, number * chunk) for _, at, number in there], dim + 1)
    return split.narrow(dim + 1, 0, cut.count).flatten(dim, dim + 2).contiguous()


def take_part(x: Tensor, cut: Cut, sizes: Mapping[str, int], coords: Mapping[str, int], zeros: bool = False) -> Tensor:
    """One part of a whole tensor. Padding repeats the last entry, as finite as real ones, or holds `zeros`."""
    split = x.unflatten(cut.dim, (cut.outer, cut.count, cut.unit))
    found = []
    for start, length in cut.spans(sizes, coords):
        real = max(0, min(length, cut.count - start))
        piece = split.narrow(cut.dim + 1, min(start, cut.count), real)
        if real < length:
            last = split.narrow(cut.dim + 1, cut.count - 1, 1)
            missing = [length - real if dim == cut.dim + 1 else -1 for dim in range(split.dim())]
            piece = torch.cat([piece, (torch.zeros_like(last) if zeros else last).expand(missing)], cut.dim + 1)
        found.append(piece)
    part = found[0] if len(found) == 1 else torch.cat(found, cut.dim + 1)
    return part.flatten(cut.dim, cut.dim + 2).contiguous()


def put_part(x: Tensor, cut: Cut, sizes: Mapping[str, int], coords: Mapping[str, int]) -> Tensor:
    """A whole tensor of zeros but for this part, without its padding."""
    length = x.shape[cut.dim] // (cut.outer * cut.unit)
    split = x.unflatten(cut.dim, (cut.outer, length, cut.unit))
    out = split.new_zeros((*split.shape[: cut.dim + 1], cut.count, *split.shape[cut.dim + 2 :]))
    at = 0
    for start, size in cut.spans(sizes, coords):
        real = max(0, min(size, cut.count - start))
        out.narrow(cut.dim + 1, min(start, cut.count), real).copy_(split.narrow(cut.dim + 1, at, real))
        at += size
    return out.flatten(cut.dim, cut.dim + 2)


# -- positions ---------------------------------------------------------------------------------------------------------


def positions(
    cuts: Sequence[Cut],
    size: int,
    sizes: Mapping[str, int],
    coords: Mapping[str, int],
    device: torch.device | str = "cpu",
    mark_padding: bool = False,
) -> Tensor:
    """The global positions along a dimension of `size` that the part under all its `cuts` holds: int64[local size].

    In padding the last position is repeated, or with `mark_padding` it is -1.
    """
    where = torch.arange(size, device=device)
    # From the innermost factor outwards, so that the outer factors of a cut are still whole when it is applied.
    for cut in sorted(cuts, key=lambda cut: -cut.outer):
        ways = cut.ways(sizes)
        held = cut.held(cut.index(sizes, coords), ways)
        chunks = cut.each(ways) * ways
        if cut.count % chunks == 0:  # whatever is cut inside the parts
            numbers = [first + k for first, number in held for k in range(number)]
            where = where.view(cut.outer, chunks, -1)[:, numbers].reshape(-1)
            continue
        chosen = torch.cat([torch.arange(s, s + n, device=device) for s, n in cut.spans(sizes, coords)])
        padding = chosen >= cut.count
        where = where.view(cut.outer, cut.count, -1)[:, chosen.clamp_(max=max(cut.count - 1, 0))]
        if mark_padding:
            where = where.masked_fill(padding[None, :, None], -1)
        where = where.reshape(-1)
    return where


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive positions along a dimension: `length` of them, from `start` globally and from `local` here."""

    start: int
    local: int
    length: int


def runs(cuts: Sequence[Cut], size: int, sizes: Mapping[str, int], coords: Mapping[str, int]) -> list[Run]:
    """The runs of a dimension of `size` that the part under all its `cuts` holds, without padding."""
    if len(cuts) == 1 and cuts[0].outer == 1:  # the usual case, without a list of all positions
        found, local = [], 0
        for start, length in cuts[0].spans(sizes, coords):
            real = max(0, min(length, cuts[0].count - start))
            if real:
                found.append(Run(start * cuts[0].unit, local * cuts[0].unit, real * cuts[0].unit))
            local += length
        return found
    where = positions(cuts, size, sizes, coords, mark_padding=True)
    real = torch.nonzero(where >= 0).view(-1)
    if not len(real):
        return []
    breaks = (torch.diff(where[real]) != 1) | (torch.diff(real) != 1)
    edges = [0, *(torch.nonzero(breaks).view(-1) + 1).tolist(), len(real)]
    return [
        Run(int(where[real[first]]), int(real[first]), end - first)
        for first, end in itertools.pairwise(edges)
    ]  # fmt: skip


def local_part(tensor: Tensor, cuts: Sequence[Cut], sizes: Mapping[str, int], coords: Mapping[str, int]) -> Tensor:
    """The part of a global tensor; padding repeats the last real entry."""
    for dim in {cut.dim for cut in cuts}:
        own = [cut for cut in cuts if cut.dim == dim]
        index = positions(own, tensor.shape[dim], sizes, coords, tensor.device)
        tensor = tensor.index_select(dim, index)
    return tensor


def part_of_rows(
    rows: Tensor,
    first: int,
    shape: Sequence[int],
    cuts: Sequence[Cut],
    sizes: Mapping[str, int],
    coords: Mapping[str, int],
) -> Iterator[tuple[int, Tensor]]:
    """What a part holds of the rows from `first` on of a global tensor of `shape`: (start, values) of each run of the
    part's rows, `start` counted in elements of the part. Padding repeats the last real entry."""
    below = [cut for cut in cuts if cut.dim > 0]
    along = [cut for cut in cuts if cut.dim == 0]
    if not along:
        part = local_part(rows, below, sizes, coords)
        yield first * math.prod(part.shape[1:]), part
        return
    where = positions(along, shape[0], sizes, coords)
    mine = torch.nonzero((where >= first) & (where < first + len(rows))).view(-1)
    for run in mine.tensor_split((torch.nonzero(mine.diff() != 1).view(-1) + 1).tolist()):
        if len(run):
            part = local_part(rows.index_select(0, (where[run] - first).to(rows.device)), below, sizes, coords)
            yield int(run[0]) * math.prod(part.shape[1:]), part


@cache
def parse_cuts(text: str) -> tuple[Cut, ...]:
    """The cuts written in `text`; "" is none."""
    cuts = []
    for piece in filter(None, text.split(";")):
        dim, axes, outer, count, unit, *order = piece.split(":")
        axes = tuple(filter(None, axes.split(",")))
        cuts.append(Cut(int(dim), axes, int(outer), int(count), int(unit), *order))
    return tuple(cuts)
