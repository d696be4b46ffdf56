"""The memory reader: live bytes on a rank over a step, by category, and the peak.

Read from a dry run (`compiler.analysis.dry_run`), so everything that the runtime allocates is counted: parameters,
gradients and optimizer state in their buffers; activations (what segments pass on and save); temporaries of one
instruction, to the byte and in the order in which the generated code makes and deletes them; buffers of collectives.
Not counted: the allocator's rounding, and what a kernel takes and gives back within one operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiler.analysis.dry_run import COMMUNICATION, TEMPORARIES, DryRun, kept
from compiler.analysis.events import Allocate, Communicate, Event, Release
from compiler.ir.graph import Node
from runtime.instructions import Instruction


@dataclass(frozen=True)
class Moment:
    """Bytes around one instruction: alive before it, and at its peak inside."""

    instruction: Instruction
    before: int
    peak: int


@dataclass(frozen=True)
class Peak:
    """The most that is alive: `bytes`, in which instruction (its number in the stream), for which node of its segment's
    code (None: outside of one), and by category."""

    bytes: int
    number: int
    instruction: Instruction
    node: Node | None
    categories: Mapping[str, int]


@dataclass(frozen=True)
class Memory:
    """A rank's memory over one step. `resting` are the bytes by category between steps, `host` those in the memory of
    the host, which are in nothing else here where it is not the device's."""

    stage: int
    moments: Sequence[Moment]
    peak: Peak
    resting: Mapping[str, int]
    host: int = 0


def read_memory(run: DryRun) -> Memory:
    """The memory of a step."""
    shapes: dict[int, tuple[int, int]] = {}
    moments = []
    for step in run.steps:
        before = level = peak = sum(step.before.values())
        for chunk in step.chunks:
            if id(chunk) not in shapes:
                shapes[id(chunk)] = shape_of(chunk)
            net, top = shapes[id(chunk)]
            level, peak = level + net, max(peak, level + top)
        moments.append(Moment(step.instruction, before, peak))
    number = max(range(len(moments)), key=lambda k: moments[k].peak)
    return Memory(run.stage, moments, peak_of(run, number), positive(run.steps[0].before), run.host)


def shape_of(events: Sequence[Event]) -> tuple[int, int]:
    """(bytes at the end, bytes at the highest point), above those at the start."""
    live = most = 0
    for event in events:
        if isinstance(event, Allocate):
            live += event.bytes
            most = max(most, live)
        elif isinstance(event, Release):
            live -= event.bytes
    return live, most


def peak_of(run: DryRun, number: int) -> Peak:
    """What is alive at the highest point of an instruction."""
    step = run.steps[number]
    events = list(step.events)
    position = highest(events)
    alive = Counter(step.before)
    own: dict[int, int] = {}
    for event in events[:position]:
        if isinstance(event, Allocate):
            own[event.storage] = event.bytes
        elif isinstance(event, Release) and event.category is None:
            own.pop(event.storage)
        elif isinstance(event, Release):
            alive[event.category] -= event.bytes
    ending = {e.storage for e in events[position:] if isinstance(e, Release) and e.category is None}
    moved = {storage for e in events if isinstance(e, Communicate) for storage in e.storages}
    for storage, size in own.items():
        if storage not in ending:
            alive[kept(step.instruction)] += size
        else:
            alive[COMMUNICATION if storage in moved else TEMPORARIES] += size
    at = events[position - 1] if position else None
    target = (step.instruction.targets or (step.instruction.op,))[0]
    node = run.node(target, at.line) if isinstance(at, Allocate) else None
    return Peak(sum(alive.values()), number, step.instruction, node, positive(alive))


def highest(events: Sequence[Event]) -> int:
    """The number of events up to the highest point."""
    live = most = position = 0
    for k, event in enumerate(events):
        if isinstance(event, Allocate):
            live += event.bytes
            if live > most:
                most, position = live, k + 1
        elif isinstance(event, Release):
            live -= event.bytes
    return position


def positive(sizes: Mapping[str, int]) -> dict[str, int]:
    """Without what is nothing."""
    return {category: size for category, size in sizes.items() if size}
