"""Instruction streams: the work of a pipeline stage, with everything that it needs around it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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
    offloads = any(bucket.offload != "none" for bucket in request.buckets)
    steps = request.optimizer and not (request.clip or request.finite or offloads)
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
        # All second reductions start before the first is waited for, in the order of the buckets: stages that share some
        # finish them in different orders.
        for name in trained:
            yield from final[name]
            final[name] = []
            if trained[name].across:
                across = Instruction("reduce_across", (name,))
                yield across
                final[name] = [wait_for(across)]
    together = request.finite or request.clip or not request.optimizer
    if together:
        for name in order:
            yield from final[name]
            final[name] = []
    if request.finite:
        yield Instruction("finite")
    if request.clip:
        yield Instruction("clip")
    if request.optimizer:
        yield from steps_of([trained[name] for name in order], final)
    if request.updates:
        yield Instruction("update")
    yield Instruction("report")


def steps_of(order: Sequence[Bucket], final: Mapping[str, Sequence[Instruction]]) -> Iterator[Instruction]:
    """Each bucket's step, behind what makes its gradient final. What the host steps is copied there and back while it
    steps others."""

    def each(op: str, *buckets: Bucket) -> list[Instruction]:
        return [Instruction(op, (bucket.name,)) for bucket in buckets]

    on_host = [bucket for bucket in order if bucket.offload in ("optimizer", "all")]
    for bucket in on_host:
        yield from final[bucket.name]
        yield from each("unload", bucket)
    back: list[Instruction] = []
    for bucket in order:
        if bucket in on_host:
            yield from map(wait_for, each("unload", bucket))
        else:
            yield from final[bucket.name]
        if bucket.offload == "params":
            (load,) = each("load", bucket)
            yield from (load, wait_for(load))
        yield from each("step", bucket)
        follows = {"optimizer": "load", "params": "store"}.get(bucket.offload)
        if follows is not None:
            back += each(follows, bucket)
            yield back[-1]
    yield from map(wait_for, back)
