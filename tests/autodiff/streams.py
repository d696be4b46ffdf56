"""Rewriting instruction streams: every backward in two parts, the weight parts later and in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compiler.driver import Compilation
from runtime.instructions import Instruction

BEHIND = ("reduce", "clip", "step", "update", "report")
"""What needs finished gradients of parameters."""


def split_backwards(compilation: Compilation, patience: int) -> Compilation:
    """The same program, with weight parts up to `patience` instructions late (each call's in the order of micro-batches,
    so that sums have the order that they had)."""
    streams = tuple(split_stream(stream, patience) for stream in compilation.program.streams)
    return replace(compilation, program=replace(compilation.program, streams=streams))


def split_stream(stream: Sequence[Instruction], patience: int) -> tuple[Instruction, ...]:
    found: list[Instruction] = []
    waiting: list[Instruction] = []
    for instruction in stream:
        if instruction.op == "backward":
            found.append(replace(instruction, op="backward_input"))
            waiting.append(replace(instruction, op="backward_weight"))
        else:
            if instruction.op in BEHIND:
                found += flushed(waiting)
            found.append(instruction)
        if len(waiting) > patience:
            found += flushed(waiting)
    return tuple(found)


def flushed(waiting: list[Instruction]) -> list[Instruction]:
    """All that waits, by the name of the call."""
    found = sorted(waiting, key=lambda item: (item.target, item.micro))
    waiting.clear()
    return found
