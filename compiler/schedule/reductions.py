"""Reductions: when gradients are summed over the ranks.

Without ZeRO, or with gradients that are kept whole, a bucket is reduced once, behind the last micro-batch's last
gradient of it; one that several stages have a copy of, behind the last work of each stage: they must reduce such buckets
in one order, and the sum waits for the last of them anyway. With scattered gradients (ZeRO 2 and 3) a bucket is reduced
for each micro-batch: the whole gradients come into being in front of the first, and go when the sum has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable

from compiler.schedule.work import Timeline
from runtime.instructions import Instruction, wait_for
from runtime.program import Bucket

IN_FLIGHT = 2
"""Reductions of whole gradients under way at once: more would only keep more memory."""


def place_reductions(
    timeline: Timeline, buckets: Iterable[Bucket], scatter: bool, steps: bool
) -> list[Instruction]:
    """Put `begin` and `reduce` into the timeline, and `wait` for those that give memory back; the reductions that are
    still under way at the end, in the order in which they were started.

    `scatter`: for each micro-batch. `steps`: a bucket whose sum has arrived is stepped at once.
    """
    begins: dict[int, list[tuple[Bucket, int | None]]] = {}
    ends: dict[int, list[tuple[Bucket, int | None]]] = {}
    final: dict[Instruction, int] = {}  # the last reductions of buckets, and where they are read for the last time
    for bucket in buckets:
        for micro, givers in rounds(timeline, bucket, scatter).items():
            if bucket.zero >= 2:
                begins.setdefault(givers[0], []).append((bucket, micro))
            if bucket.axes:
                shared = len(bucket.stages) > 1 and not bucket.across
                ends.setdefault(len(timeline.work) - 1 if shared else givers[-1], []).append((bucket, micro))
                last = Instruction("reduce", (bucket.name,), micro)
        if bucket.trained and bucket.axes and not bucket.across:
            final[last] = last_read(timeline, bucket)
    under_way: list[tuple[Bucket, Instruction]] = []
    for k in range(len(timeline.work)):
        for bucket, micro in begins.get(k, ()):
            holding = [item for item in under_way if item[0].zero >= 2]
            # The buffer of this very bucket must be free again, and few others in flight.
            own = max((i for i, item in enumerate(holding) if item[0] is bucket), default=-1)
            for item in holding[: max(own + 1, len(holding) - IN_FLIGHT + 1)]:
                timeline.before[k].append(wait_for(item[1]))
                if steps and final.get(item[1], k) < k:
                    timeline.before[k].append(Instruction("step", (item[0].name,)))
                under_way.remove(item)
            timeline.before[k].append(Instruction("begin", (bucket.name,), micro))
        for bucket, micro in ends.get(k, ()):
            reduce = Instruction("reduce", (bucket.name,), micro)
            timeline.after[k].append(reduce)
            under_way.append((bucket, reduce))
    return [reduce for _, reduce in under_way]


def rounds(timeline: Timeline, bucket: Bucket, scatter: bool) -> dict[int | None, list[int]]:
    """The work that gives gradients of a bucket, by micro-batch where each has a reduction of its own. Where a schedule
    begins a micro-batch's gradients before another's are complete (split backwards), they share one. A stage that has no
    gradients for its copy (it uses a tied weight without) takes part behind its last work, with zeros."""
    mine = set(bucket.parameters) if bucket.trained else set()
    each = scatter and bucket.zero >= 2
    found: dict[int | None, list[int]] = {}
    for k, work in enumerate(timeline.work):
        if mine.intersection(work.trained):
            found.setdefault(work.micro if each else None, []).append(k)
    apart: dict[int | None, list[int]] = {}
    last: int | None = None
    for micro, givers in sorted(found.items(), key=lambda item: item[1][0]):
        if apart and givers[0] < apart[last][-1]:
            earlier = apart.pop(last)
            givers = sorted((*earlier, *givers))
        apart[micro] = givers
        last = micro
    if not apart and bucket.trained and len(bucket.stages) > 1:
        apart[None] = [len(timeline.work) - 1]
    return apart


def last_read(timeline: Timeline, bucket: Bucket) -> int:
    """The last work that reads a parameter of the bucket."""
    mine = set(bucket.parameters)
    return max((k for k, work in enumerate(timeline.work) if mine.intersection(work.parameters)), default=-1)
