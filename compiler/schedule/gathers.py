"""Gathers: when parameters that ZeRO keeps in shards are whole.

A stretch of work during which a bucket must be whole begins with the wait for its gather. With ZeRO 3 it ends where
the bucket is not used soon again, and a gather is started while the `prefetch` stretches before it are under way. With
ZeRO 1 and 2 whole parameters have memory of their own, so all gathers start at the beginning of the step, in the order of
their use: they bring what the optimizer changed in the shards at the end of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.schedule.work import Timeline
from runtime.instructions import Instruction, wait_for
from runtime.program import Bucket


@dataclass(frozen=True)
class Stretch:
    """A bucket is whole from work `first` to work `last`; freed behind that if `freed`."""

    bucket: str
    first: int
    last: int
    freed: bool


def place_gathers(timeline: Timeline, buckets: Sequence[Bucket], prefetch: int, once: bool) -> None:
    """Put the gathers of sharded buckets into the timeline. `once`: what is gathered stays to the end of the step."""
    found = [stretch for bucket in buckets if bucket.shard for stretch in stretches(timeline, bucket, once)]
    while True:
        found.sort(key=lambda stretch: (stretch.first, stretch.last))
        starts = gather_starts(found, prefetch)
        merged = without_breaks(found, starts)
        if len(merged) == len(found):
            break
        found = merged
    on_host = {bucket.name for bucket in buckets if bucket.offload in ("params", "all")}
    for stretch, start in zip(found, starts):
        if stretch.bucket in on_host:
            load = Instruction("load", (stretch.bucket,))
            timeline.before[start] += [load, wait_for(load)]
        timeline.before[start].append(Instruction("gather", (stretch.bucket,)))
    for stretch in found:  # behind all gathers that start here
        timeline.before[stretch.first].append(wait_for(Instruction("gather", (stretch.bucket,))))
        if stretch.freed:
            timeline.after[stretch.last].append(Instruction("free", (stretch.bucket,)))


def stretches(timeline: Timeline, bucket: Bucket, once: bool) -> list[Stretch]:
    """When a bucket is needed."""
    mine = set(bucket.parameters)
    uses = [k for k, work in enumerate(timeline.work) if mine.intersection(work.parameters)]
    if uses and (bucket.zero < 3 or once):
        return [Stretch(bucket.name, uses[0], uses[-1], bucket.zero == 3)]
    return [Stretch(bucket.name, use, use, True) for use in uses]


def gather_starts(found: Sequence[Stretch], prefetch: int) -> list[int]:
    """Before which work each gather starts: with the stretch `prefetch` before its own, and not before the last
    stretch of the same bucket has ended; at once where memory for it is kept anyway."""
    starts, ended = [], {}
    for k, stretch in enumerate(found):
        ahead = found[k - prefetch].first if k >= prefetch and stretch.freed else 0
        starts.append(max(ahead, ended.get(stretch.bucket, 0)))
        ended[stretch.bucket] = stretch.last + 1
    return starts


def without_breaks(found: Sequence[Stretch], starts: Sequence[int]) -> list[Stretch]:
    """The stretches with those joined between which a bucket would be freed and gathered again at once."""
    joined: dict[str, list[Stretch]] = {}
    for stretch, start in zip(found, starts):
        mine = joined.setdefault(stretch.bucket, [])
        if mine and start <= mine[-1].last + 1:
            mine[-1] = Stretch(stretch.bucket, mine[-1].first, stretch.last, stretch.freed)
        else:
            mine.append(stretch)
    return [stretch for mine in joined.values() for stretch in mine]
