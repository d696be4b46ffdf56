"""The instruction stream of a program without a pipeline: micro-batch after micro-batch, forward then backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runtime.instructions import Instruction
from runtime.program import Bucket, Call


@dataclass(frozen=True)
class CallInfo:
    """A call with what its code says: which arguments the backward reads again, whether there is a backward."""

    call: Call
    needed: tuple[int, ...]
    has_backward: bool


def data_parallel_stream(
    calls: Sequence[CallInfo], buckets: Sequence[Bucket], microbatches: int, has_prologue: bool, clip: bool,
    optimizer: bool, updates: bool, kept: frozenset[str] = frozenset(),
) -> tuple[Instruction, ...]:  # fmt: skip
    """All micro-batches one after the other; a bucket's reduction starts as soon as its last gradient is final.

    `kept` are slots that are read after the last micro-batch (reported values, new buffer contents).
    """
    stream: list[Instruction] = [Instruction("prologue")] if has_prologue else []
    ready = completion(calls, buckets)
    for micro in range(microbatches):
        last = micro == microbatches - 1
        body: list[tuple[Instruction, CallInfo]] = [
            (Instruction("forward", (info.call.name,), micro), info) for info in calls
        ] + [(Instruction("backward", (info.call.name,), micro), info) for info in reversed(calls) if info.has_backward]
        dropped = last_reads(body, kept)
        for k, (instruction, info) in enumerate(body):
            stream.append(instruction)
            if dropped[k]:
                stream.append(Instruction("drop", tuple(dropped[k]), micro))
            if last and instruction.op == "backward":
                stream += [Instruction("reduce", (b.name,)) for b in ready.get(info.call.name, ()) if b.axes]
    stream += finish(buckets, clip, optimizer, updates)
    return tuple(stream)


def finish(buckets: Sequence[Bucket], clip: bool, optimizer: bool, updates: bool) -> Iterator[Instruction]:
    """What ends a step. Without clipping a bucket is stepped as soon as it is reduced, while others are under way."""
    waits = [[Instruction("wait", (bucket.name,))] if bucket.axes else [] for bucket in buckets]
    steps = [Instruction("step", (bucket.name,)) for bucket in buckets] if optimizer else []
    if clip or not optimizer:
        for wait in waits:
            yield from wait
        if clip:
            yield Instruction("clip")
        yield from steps
    else:
        for wait, step in zip(waits, steps):
            yield from (*wait, step)
    if updates:
        yield Instruction("update")
    yield Instruction("report")


def completion(calls: Sequence[CallInfo], buckets: Sequence[Bucket]) -> Mapping[str, list[Bucket]]:
    """For each call, the buckets whose last gradient its backward makes."""
    final: dict[str, str] = {}
    for info in calls:  # the first call in forward order is the last in backward order
        for reference in info.call.gradients:
            if reference.startswith("param:"):
                final.setdefault(reference.removeprefix("param:"), info.call.name)
    position = {info.call.name: k for k, info in enumerate(calls)}
    ready: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        last = min((final[name] for name in bucket.parameters), key=position.__getitem__)
        ready.setdefault(last, []).append(bucket)
    return ready


def last_reads(body: Sequence[tuple[Instruction, CallInfo]], kept: frozenset[str]) -> list[list[str]]:
    """Behind each instruction, the slots that nobody reads any more."""
    last: dict[str, int] = {}
    for k, (instruction, info) in enumerate(body):
        call = info.call
        if instruction.op == "forward":
            read = call.arguments + call.results
        else:
            read = tuple(call.arguments[index] for index in info.needed)
        last.update((reference, k) for reference in read if ":" not in reference and reference not in kept)
    dropped: list[list[str]] = [[] for _ in body]
    for slot, k in last.items():
        dropped[k].append(slot)
    return dropped
