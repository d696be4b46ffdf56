"""The verifier: the instruction streams of a program are sound, whatever made them.

Proved before anything is launched, for one stream per pipeline stage (all ranks of a stage run the same):

- slots are there when they are read: made, or received and waited for, and not yet dropped;
- gradients of slots are all there when they are used, used once, and none is left over;
- parameters are whole when they are read, and not read after the optimizer has stepped them;
- each gradient of a parameter is reduced exactly once, before the optimizer or the norm reads it;
- each bucket is stepped once, and everything that is started is waited for;
- every call's forward and backward runs once for each micro-batch;
- every send meets its receive, in the same order on its channel, with the shape and dtype that its ends have;
- collectives agree in kind, group, shape, dtype and order on every member;
- no circle of waits: no stream stops for ever.

A fault is an error of planc, not of the plan; it says which stage, which line, and what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from compiler.analysis.stream_rules import Code, Fault, Part, StageRules
from compiler.analysis.stream_waits import verify_waits
from runtime.program import Program

if TYPE_CHECKING:
    from compiler.link import Kind

SHOWN = 10


class StreamError(Exception):
    """The streams of a program are not sound: an error of planc."""

    def __init__(self, faults: list[Fault]):
        more = f"\n… and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        super().__init__("\n".join(map(str, faults[:SHOWN])) + more)
        self.faults = faults


def verify_streams(program: Program, kinds: Mapping[str, Kind]) -> None:
    """Raises StreamError if the streams of a program, made of these kinds, are not sound."""
    split = {item.target for stream in program.streams for item in stream if item.op == "backward_input"}
    parted = {call.kind for call in program.calls if call.name in split}
    codes = {call.kind: code_of(kinds[call.kind], call.kind in parted) for call in program.calls}
    if faults := stream_faults(program, codes):
        raise StreamError(faults)


def code_of(kind: Kind, parted: bool) -> Code:
    """What a kind's code says of itself; `parted`: its backward runs in parts somewhere."""
    code = kind.code
    parts = {"backward": Part(tuple(code.needed), tuple(code.wanted))}
    if parted:
        for name, part in (("backward_input", kind.split.input), ("backward_weight", kind.split.weight)):
            parts[name] = Part(tuple(part.needed), tuple(part.wanted))
    arguments, results = ([(value.dtype, value.shape) for value in values] for values in (code.arguments, code.results))
    return Code(tuple(code.given), parts, tuple(arguments), tuple(results))


def stream_faults(program: Program, codes: Mapping[str, Code]) -> list[Fault]:
    """Everything that is wrong; the streams are looked at together once each is sound by itself."""
    faults = [*_message_types(program, codes)]
    for stage, stream in enumerate(program.streams):
        faults += StageRules(program, codes, stage).run(stream)
    return faults or verify_waits(program)


def _message_types(program: Program, codes: Mapping[str, Code]) -> Iterator[Fault]:
    """A message has the dtype and shape that its slot's maker and readers have."""
    messages = {message.slot: (message.dtype, message.shape) for message in program.messages}
    for call in program.calls:
        code = codes[call.kind]
        ends = [*zip(call.arguments, code.arguments), *zip(call.results, code.results)]
        for slot, type in ends:
            for name in (slot, f"d:{slot}"):
                if messages.get(name, type) != type:
                    shown = [f"{dtype}{list(shape)}" for dtype, shape in (messages[name], type)]
                    yield Fault(
                        call.stages[0], None, None, f"the message {name} is {shown[0]}, {call.name} has {shown[1]}"
                    )
