"""Instructions: what one rank does in one step, as a list of short lines that print and parse back.

    prologue                     values computed once from the whole local batch
    forward  layers.0 @1         run a call's forward code on micro-batch 1
    backward layers.0 @1         run its backward code: gradients of slots are summed, those of parameters accumulated
    backward_input  layers.0 @1  only the gradients of slots …
    backward_weight layers.0 @1  … and later those of parameters (zero-bubble pipelines)
    drop     layers.0/x @1       nobody reads this slot of micro-batch 1 again
    reduce   bucket0             start summing a bucket's accumulated gradient over its axes
    wait     bucket0             … until that is done
    clip                         scale all gradients by the global norm
    step     bucket0             optimizer step of a bucket
    update                       buffers take their new contents
    report                       loss and metrics are summed over ranks and micro-batches

The executor, the simulator, the memory and time readers and the verifier all read this one list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

OPERATIONS = (
    "prologue", "forward", "backward", "backward_input", "backward_weight", "drop", "reduce", "wait", "clip", "step",
    "update", "report",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Instruction:
    """`op` on `targets`, for micro-batch `micro` where it belongs to one."""

    op: str
    targets: tuple[str, ...] = ()
    micro: int | None = None

    @property
    def target(self) -> str:
        return self.targets[0]

    def __str__(self) -> str:
        at = [] if self.micro is None else [f"@{self.micro}"]
        return " ".join([self.op, *self.targets, *at])


def parse_instruction(line: str) -> Instruction:
    """The inverse of `str(instruction)`. Raises ValueError."""
    op, *rest = line.split()
    if op not in OPERATIONS:
        raise ValueError(f"unknown instruction {op!r} in {line!r}; known: {', '.join(OPERATIONS)}")
    micro = int(rest.pop()[1:]) if rest and rest[-1].startswith("@") else None
    return Instruction(op, tuple(rest), micro)


def format_stream(instructions: Iterable[Instruction]) -> str:
    """One instruction a line."""
    return "".join(f"{item}\n" for item in instructions)


def parse_stream(text: str) -> Iterator[Instruction]:
    """The instructions of `format_stream`; blank lines and `#` comments are skipped."""
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if line:
            yield parse_instruction(line)
