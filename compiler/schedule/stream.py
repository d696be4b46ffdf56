"""Instruction streams: the work of a pipeline stage, with everything that it needs around it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from compiler.schedule.gathers import place_gathers
from compiler.schedule.lifetimes import drop_slots
from compiler.schedule.messages import place_messages
from compiler.schedule.reductions import place_reductions
from compiler.schedule.work import CallInfo, Timeline, Work
from runtime.instructions import Instruction, wait_for
from runtime.program import Bucket


@dataclass(frozen=True)
class StreamRequest:
    """What a stream needs to know besides its work. `kept`: slots that are read after the last micro-batch; `prefetch`,
    `gather_once` and `scatter`: see `gathers` and `reductions`."""

    buckets: Sequence[Bucket]
    has_prologue: bool = False
    finite: bool = False
    clip: bool = False
    optimizer: bool = True
    updates: bool = False
    kept: Collection[str] = ()
    prefetch: int = 1
    gather_once: bool = False
    scatter: bool = True


def one_after_the_other(calls: Sequence[CallInfo], microbatches: int) -> list[Work]:
    """The work of a program without a pipeline: micro-batch after micro-batch, forward then backward."""
    work = []
    for micro in range(microbatches):
        work += [Work("forward", info, micro) for info in calls]
        work += [Work("backward", info, micro) for info in reversed(calls) if info.has_backward]
    return work


def streams(
    work: Sequence[Sequence[Work]], requests: Sequence[StreamRequest]
) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions of one step on each pipeline stage."""
    timelines = [Timeline(own) for own in work]
    place_messages(timelines)
    return tuple(stream(timeline, request) for timeline, request in zip(timelines, requests, strict=True))


def stream(timeline: Timeline, request: StreamRequest) -> tuple[Instruction, ...]:
    """The instructions of one stage, whose timeline has the messages already."""
    drop_slots(timeline, request.kept)
    place_gathers(timeline, request.buckets, request.prefetch, request.gather_once)
    steps = request.optimizer and not request.clip
    under_way = place_reductions(timeline, request.buckets, request.scatter, steps)
    prologue = [Instruction("prologue")] if request.has_prologue else []
    body = timeline.instructions()
    stepped = {instruction.target for instruction in body if instruction.op == "step"}
    return (*prologue, *body, *finish(request, under_way, stepped))


def finish(
    request: StreamRequest, under_way: Sequence[Instruction], stepped: Collection[str]
) -> Iterator[Instruction]:
    """What ends a step. With neither a loss scale nor clipping a bucket is stepped as soon as it is reduced, while others are under way."""
    trained = {bucket.name: bucket for bucket in request.buckets if bucket.trained and bucket.name not in stepped}
    reduced = {reduce.target: [wait_for(reduce)] for reduce in under_way}
    order = [*reduced, *(name for name in trained if name not in reduced)]
    final = {name: reduced.get(name, []) for name in order}
    if any(bucket.across for bucket in trained.values()):
        # All second reductions start before the first is waited for.
        for name in order:
            yield from final[name]
            final[name] = []
            if trained[name].across:
                across = Instruction("reduce_across", (name,))
                yield across
                final[name] = [wait_for(across)]
    together = request.finite or request.clip or not request.optimizer
    for name in order:
        yield from final[name]
        if not together:
            yield Instruction("step", (name,))
    if request.finite:
        yield Instruction("finite")
    if request.clip:
        yield Instruction("clip")
    if together and request.optimizer:
        yield from (Instruction("step", (name,)) for name in order)
    if request.updates:
        yield Instruction("update")
    yield Instruction("report")
