"""Buckets: which parameters lie in one flat buffer, are gathered and reduced together.

In the order in which gradients become final, a bucket is closed when it is full, so that a reduction can start while
the backward goes on (Li et al. 2020, https://arxiv.org/abs/2006.15704). Parameters that ZeRO 3 gathers for their use
are grouped by the calls that use them instead, as in FSDP (Zhao et al. 2023, https://arxiv.org/abs/2304.11277).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from runtime.program import Bucket


@dataclass(frozen=True)
class Alike:
    """What the members of a bucket have in common: see `runtime.program.Bucket`."""

    dtype: str
    axes: tuple[str, ...]
    shard: tuple[str, ...] = ()
    zero: int = 0
    trained: bool = True
    stages: tuple[int, ...] = (0,)
    reduce: str = ""
    master: str = ""
    offload: str = "none"


@dataclass(frozen=True)
class Member:
    """A parameter to put into a bucket: its local shape, and the calls that use it, in order."""

    name: str
    shape: tuple[int, ...]
    alike: Alike
    users: tuple[str, ...] = ()


def make_buckets(members: Sequence[Member], cap: int, decays: Callable[[str], bool]) -> tuple[Bucket, ...]:
    """Buckets of at most `cap` bytes; what must go together (a larger parameter, those that one call uses under
    ZeRO 3) has its own.

    `members` are in the order in which their gradients become final.
    """
    open_groups: dict[Alike, list[Member]] = {}
    closed: list[list[Member]] = []
    for together in _indivisible(members):
        first = together[0]
        # What is as large as a bucket goes alone, and leaves the open one to small parameters. So does what several calls
        # use under ZeRO 3: others would be whole while only these are used.
        if size(together) >= cap or first.alike.zero == 3 and len(first.users) > 1:
            closed.append(together)
            continue
        group = open_groups.setdefault(first.alike, [])
        if group and size(group) + size(together) > cap:
            closed.append(group)
            group = open_groups[first.alike] = []
        group += together
    rank = {member.name: k for k, member in enumerate(members)}
    groups = closed + [group for group in open_groups.values() if group]
    groups.sort(key=lambda group: max(rank[item.name] for item in group))
    return tuple(_bucket(f"bucket{k}", group, decays) for k, group in enumerate(groups))


def _indivisible(members: Iterable[Member]) -> list[list[Member]]:
    """Single parameters, or under ZeRO 3 those that are alike and that the same calls use."""
    found: dict[tuple[Alike, tuple[str, ...]], list[Member]] = {}
    for member in members:
        users = member.users if member.alike.zero == 3 else (member.name,)
        found.setdefault((member.alike, users), []).append(member)
    return list(found.values())


def size(members: Iterable[Member]) -> int:
    """Bytes of the parameters that ZeRO gathers, or else of the gradients that are reduced."""
    return sum(math.prod(m.shape) * getattr(torch, _moved(m.alike)).itemsize for m in members)


def _moved(alike: Alike) -> str:
    return alike.dtype if alike.zero else alike.reduce or alike.dtype


def _bucket(name: str, members: list[Member], decays: Callable[[str], bool]) -> Bucket:
    decayed = [item for item in members if decays(item.name)]
    ordered = decayed + [item for item in members if not decays(item.name)]
    alike = members[0].alike
    return Bucket(
        name,
        alike.dtype,
        alike.axes,
        tuple(item.name for item in ordered),
        len(decayed),
        sum(math.prod(item.shape) for item in ordered),
        alike.shard,
        alike.zero,
        alike.reduce,
        alike.master,
        alike.trained,
        alike.stages,
        alike.offload,
    )
