"""Buckets: which gradients are reduced together.

Parameters are taken in the order in which their gradients become final, and a bucket is closed when it is full, so
that a reduction can start while the backward goes on (Li et al. 2020, https://arxiv.org/abs/2006.15704).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from runtime.program import Bucket


@dataclass(frozen=True)
class Trained:
    """A trained parameter: its local shape, and the axes over which its gradient is a partial sum."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]


def make_buckets(
    order: Sequence[str], parameters: Mapping[str, Trained], cap: int, decays: Callable[[str], bool]
) -> tuple[Bucket, ...]:
    """Buckets of at most `cap` bytes (a larger parameter has its own), of one dtype and one set of axes each.

    `order`: parameter names in the order in which their gradients become final.
    """
    open_buckets: dict[tuple[str, tuple[str, ...]], list[Trained]] = {}
    closed: list[list[Trained]] = []
    for name in order:
        item = parameters[name]
        members = open_buckets.setdefault((item.dtype, item.axes), [])
        if members and size(members) + size([item]) > cap:
            closed.append(members)
            members = open_buckets[item.dtype, item.axes] = []
        members.append(item)
    rank = {name: k for k, name in enumerate(order)}
    groups = closed + [members for members in open_buckets.values() if members]
    groups.sort(key=lambda members: max(rank[item.name] for item in members))
    return tuple(_bucket(f"bucket{k}", members, decays) for k, members in enumerate(groups))


def size(members: Iterable[Trained]) -> int:
    """Bytes."""
    return sum(math.prod(m.shape) * getattr(torch, m.dtype).itemsize for m in members)


def _bucket(name: str, members: list[Trained], decays: Callable[[str], bool]) -> Bucket:
    decayed = [item for item in members if decays(item.name)]
    ordered = decayed + [item for item in members if not decays(item.name)]
    return Bucket(
        name,
        members[0].dtype,
        members[0].axes,
        tuple(item.name for item in ordered),
        len(decayed),
        sum(math.prod(item.shape) for item in ordered),
    )
