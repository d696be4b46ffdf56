"""Lifetimes of slots: behind each instruction, what nobody reads any more is dropped."""

from __future__ import annotations

from collections.abc import Collection

from compiler.schedule.work import Timeline
from runtime.instructions import Instruction


def drop_slots(timeline: Timeline, kept: Collection[str]) -> None:
    """Drop each slot of each micro-batch behind its last use, but for `kept` ones: those are read after the last
    micro-batch (reported values, new buffer contents)."""
    last: dict[tuple[str, int], int] = {}
    for k, work in enumerate(timeline.work):
        last.update(((slot, work.micro), k) for slot in work.slots if slot not in kept)
    dropped: dict[tuple[int, int], list[str]] = {}
    for (slot, micro), k in last.items():
        dropped.setdefault((k, micro), []).append(slot)
    for (k, micro), slots in dropped.items():
        timeline.after[k].append(Instruction("drop", tuple(slots), micro))
