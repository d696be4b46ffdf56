"""The memory reader: live bytes on a rank over a step, by category, and the peak.

Read from a dry run (`compiler.analysis.dry_run`), so everything that the runtime allocates is counted: parameters,
gradients and optimizer state in their buffers; activations (what segments pass on and save); temporaries of one
instruction, to the byte and in the order in which the generated code makes and deletes them; buffers of collectives. Not
counted: the allocator's rounding, and what a kernel takes and gives back within one operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiler.analysis.dry_run import COMMUNICATION, KEPT, OTHER, TEMPORARIES, DryRun, Step
from compiler.analysis.events import Allocate, Communicate, Event, Release
from runtime.instructions import Instruction


@dataclass(frozen=True)
class Moment:
    """Bytes around one instruction: alive before it, and at its peak inside."""

    instruction: Instruction
    before: int
    peak: int


@dataclass(frozen=True)
class Peak:
    """The most that is alive: `bytes`, at which instruction (its number in the stream) and line of its segment's code (0:
    outside of one), and by category."""

    bytes: int
    number: int
    instruction: Instruction
    line: int
    categories: Mapping[str, int]


@dataclass(frozen=True)
class Memory:
    """A rank's memory over one step. `resting` are the bytes by category between steps."""

    stage: int
    moments: Sequence[Moment]
    peak: Peak
    resting: Mapping[str, int]


def read_memory(run: DryRun) -> Memory:
    """The memory of a step."""
    moments, rises = [], []
    known: dict[tuple[int, ...], int] = {}
    for step in run.steps:
        key = tuple(id(chunk) for chunk in step.chunks)
        if key not in known:
            known[key] = highest(step.events)[0]
        before = sum(step.before.values())
        rises.append(before + known[key])
        moments.append(Moment(step.instruction, before, before + known[key]))
    number = max(range(len(rises)), key=rises.__getitem__)
    return Memory(run.stage, moments, peak_of(run.steps[number], number), positive(run.steps[0].before))


def highest(events: Sequence[Event]) -> tuple[int, int, int]:
    """(bytes above the start, position behind the event, line) of the highest point."""
    live = most = position = line = 0
    for k, event in enumerate(events):
        if isinstance(event, Allocate):
            live += event.bytes
            if live > most:
                most, position, line = live, k + 1, event.line
        elif isinstance(event, Release):
            live -= event.bytes
    return most, position, line


def peak_of(step: Step, number: int) -> Peak:
    """What is alive at the highest point of a step."""
    events = list(step.events)
    _, position, line = highest(events)
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
            alive[KEPT.get(step.instruction.op, OTHER)] += size
        else:
            alive[COMMUNICATION if storage in moved else TEMPORARIES] += size
    return Peak(sum(alive.values()), number, step.instruction, line, positive(alive))


def positive(sizes: Mapping[str, int]) -> dict[str, int]:
    """Without what is nothing."""
    return {category: size for category, size in sizes.items() if size}
