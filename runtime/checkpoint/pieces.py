"""Pieces: which rectangles of a logical tensor a rank holds, and where in its memory.

The cuts of a parameter (`runtime.cuts`) choose positions along each dimension. Runs of consecutive positions, one for
each dimension, span a rectangle; that is what a checkpoint stores, whatever plan wrote it and whatever plan reads it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.cuts import Cut, Run, runs


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a logical tensor. offsets: where it begins; tensor: a view of its contents, of its sizes."""

    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds of a logical tensor of `shape`. writes: whether it is the replica that saves it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    writes: bool = True


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a rank's local tensor that lies in one piece of its memory, as a view: `offsets` say where."""

    offsets: tuple[int, ...]
    tensor: Tensor


def boxes(flat: Tensor, start: int, shape: Sequence[int]) -> list[Box]:
    """The elements from `start` on of a contiguous tensor of `shape`, of which `flat` is a part, as rectangles: at most
    two for each dimension. They are what ZeRO leaves of a parameter where it cuts the flat buffer."""
    if not flat.numel():
        return []
    if len(shape) <= 1:
        return [Box((start,), flat) if shape else Box((), flat.view(()))]
    row = math.prod(shape[1:])
    found = []
    for begin, end in _thirds(start, start + flat.numel(), row):
        part = flat[begin - start : end - start]
        index, inside = divmod(begin, row)
        if inside == 0 and (end - begin) % row == 0:
            found.append(Box((index, *[0] * (len(shape) - 1)), part.view(-1, *shape[1:])))
        else:
            found += [Box((index, *box.offsets), box.tensor.unsqueeze(0)) for box in boxes(part, inside, shape[1:])]
    return found


def _thirds(start: int, end: int, row: int) -> list[tuple[int, int]]:
    """[start, end) as the rest of a first row, whole rows, and the beginning of a last one."""
    inner, outer = math.ceil(start / row) * row, end // row * row
    if inner > outer:
        return [(start, end)]  # inside one row
    return [(a, b) for a, b in ((start, inner), (inner, outer), (outer, end)) if b > a]


def pieces(
    local: Sequence[Box], shape: Sequence[int], cuts: Sequence[Cut], sizes: Mapping[str, int], coords: Mapping[str, int]
) -> tuple[Piece, ...]:
    """The pieces of a logical tensor of `shape` in what a rank holds of its `local` part; views of that."""
    along = [
        runs([cut for cut in cuts if cut.dim == dim], size, sizes, coords) if size else []
        for dim, size in enumerate(shape)
    ]
    met = (_meet(box, chosen) for box in local for chosen in itertools.product(*along))
    return tuple(piece for piece in met if piece is not None)


def _meet(box: Box, chosen: Sequence[Run]) -> Piece | None:
    """What of a box lies in these runs, one for each dimension."""
    view, offsets = box.tensor, []
    for dim, run in enumerate(chosen):
        begin = max(run.local, box.offsets[dim])
        end = min(run.local + run.length, box.offsets[dim] + box.tensor.shape[dim])
        if end <= begin:
            return None
        view = view.narrow(dim, begin - box.offsets[dim], end - begin)
        offsets.append(run.start + begin - run.local)
    return Piece(tuple(offsets), view)
