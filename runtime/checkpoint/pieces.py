"""Pieces: which rectangles of a logical tensor a rank holds, and where in its memory.

The cuts of a parameter (`runtime.cuts`) choose positions along each dimension. Runs of consecutive positions, one for
each dimension, span a rectangle; that is what a checkpoint stores, whatever plan wrote it and whatever plan reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.cuts import Cut, positions


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
class Run:
    """Consecutive positions along a dimension: `length` of them, from `start` globally and from `local` here."""

    start: int
    local: int
    length: int


def runs(cuts: Sequence[Cut], size: int, sizes: Mapping[str, int], coords: Mapping[str, int]) -> list[Run]:
    """The runs of a dimension of `size` that the part under all its `cuts` holds, without padding."""
    # Padding is -1, so that no entry seems to be held twice.
    where = positions(cuts, size, sizes, coords, torch.device("cpu"), mark_padding=True)
    real = torch.nonzero(where >= 0).view(-1)
    if not len(real):
        return []
    breaks = (torch.diff(where[real]) != 1) | (torch.diff(real) != 1)
    edges = [0, *(torch.nonzero(breaks).view(-1) + 1).tolist(), len(real)]
    return [
        Run(int(where[real[first]]), int(real[first]), end - first)
        for first, end in itertools.pairwise(edges)
    ]  # fmt: skip


def pieces(
    local: Tensor, shape: Sequence[int], cuts: Sequence[Cut], sizes: Mapping[str, int], coords: Mapping[str, int]
) -> tuple[Piece, ...]:
    """The pieces of a logical tensor of `shape` in a rank's `local` part of it; views of `local`."""
    along = [
        runs([cut for cut in cuts if cut.dim == dim], size, sizes, coords) if size else [Run(0, 0, 0)]
        for dim, size in enumerate(shape)
    ]
    found = []
    for chosen in itertools.product(*along):
        view = local
        for dim, run in enumerate(chosen):
            view = view.narrow(dim, run.local, run.length)
        found.append(Piece(tuple(run.start for run in chosen), view))
    return tuple(found)
