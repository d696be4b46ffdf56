"""Instructions: what one rank does in one step, as a list of short lines that print and parse back.

    prologue                     values computed once from the whole local batch
    gather   bucket0             start gathering a bucket's whole parameters from their shards (ZeRO)
    free     bucket0             the whole parameters are not needed for now; the shard stays
    begin    bucket0 @1          the bucket's gradient buffer comes into being
    forward  layers.0 @1         run a call's forward code on micro-batch 1
    backward layers.0 @1         run its backward code: gradients of slots are summed, those of parameters accumulated
    backward_input  layers.0 @1  only the gradients of slots …
    backward_weight layers.0 @1  … and later those of parameters (zero-bubble pipelines)
    send     layers.0/x @1 >2    start sending a slot to pipeline stage 2; "d:layers.0/x" is the gradient of a slot
    recv     layers.0/x @1 <0    start receiving it from pipeline stage 0
    drop     layers.0/x @1       nobody reads this slot of micro-batch 1 again
    load     bucket0             start copying the own part of the parameters from the host (offload)
    unload   bucket0             start copying the own part of the gradients to the host
    store    bucket0             start copying the own part of the parameters to the host
    reduce   bucket0 @1          start summing a bucket's gradient over the ranks: all-reduce, or reduce-scatter (ZeRO)
    reduce_across bucket0        start summing the own part over the axes that do not cut it (hybrid sharding)
    wait     reduce bucket0 @1   until what `reduce bucket0 @1` started is done
    finite                       are the gradients finite on every rank? Then take the loss scale off, else skip the steps
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
    "prologue", "gather", "free", "begin", "forward", "backward", "backward_input", "backward_weight", "send", "recv",
    "drop", "load", "unload", "store", "reduce", "reduce_across", "wait", "finite", "clip", "step", "update", "report",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Instruction:
    """`op` on `targets`, for micro-batch `micro` where it belongs to one; `peer` is the other stage of a message."""

    op: str
    targets: tuple[str, ...] = ()
    micro: int | None = None
    peer: int | None = None

    @property
    def target(self) -> str:
        return self.targets[0]

    @property
    def waited(self) -> Instruction:
        """Of a `wait`: what it waits for."""
        return Instruction(self.targets[0], self.targets[1:], self.micro, self.peer)

    def __str__(self) -> str:
        at = [] if self.micro is None else [f"@{self.micro}"]
        peer = [] if self.peer is None else [f"{'<' if 'recv' in (self.op, *self.targets[:1]) else '>'}{self.peer}"]
        return " ".join([self.op, *self.targets, *at, *peer])


def wait_for(instruction: Instruction) -> Instruction:
    """The `wait` that ends what an instruction starts."""
    return Instruction("wait", (instruction.op, *instruction.targets), instruction.micro, instruction.peer)


def parse_instruction(line: str) -> Instruction:
    """The inverse of `str(instruction)`. Raises ValueError."""
    op, *rest = line.split()
    if op not in OPERATIONS:
        raise ValueError(f"unknown instruction {op!r} in {line!r}; known: {', '.join(OPERATIONS)}")
    peer = int(rest.pop()[1:]) if rest and rest[-1][0] in "<>" else None
    micro = int(rest.pop()[1:]) if rest and rest[-1].startswith("@") else None
    return Instruction(op, tuple(rest), micro, peer)


def format_stream(instructions: Iterable[Instruction]) -> str:
    """One instruction a line."""
    return "".join(f"{item}\n" for item in instructions)


def parse_stream(text: str) -> Iterator[Instruction]:
    """The instructions of `format_stream`; blank lines and `#` comments are skipped."""
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if line:
            yield parse_instruction(line)
