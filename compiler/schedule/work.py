"""Work: the compute instructions of one pipeline stage in their order, with what each reads and makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from runtime.instructions import Instruction
from runtime.program import Call

BACKWARDS = ("backward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class CallInfo:
    """A call with what its code says: which arguments the backward reads again, whether there is a backward, and of which
    arguments the weight part of a split backward gives the gradients and reads the values (None: it has no such part)."""

    call: Call
    needed: tuple[int, ...]
    has_backward: bool
    weight_wanted: tuple[int, ...] = ()
    weight_needed: tuple[int, ...] | None = None

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that the call reads."""
        return tuple(ref.removeprefix("param:") for ref in self.call.arguments if ref.startswith("param:"))

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """The parameters that it has gradients for."""
        return tuple(ref.removeprefix("param:") for ref in self.call.gradients if ref.startswith("param:"))


@dataclass(frozen=True)
class Work:
    """One compute instruction: `op` ("forward", "backward", "backward_input", "backward_weight") of a call."""

    op: str
    info: CallInfo
    micro: int

    @property
    def instruction(self) -> Instruction:
        return Instruction(self.op, (self.info.call.name,), self.micro)

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that must be there: read, or made."""
        call = self.info.call
        read = call.arguments + call.results if self.op == "forward" else self._read_again
        return tuple(reference for reference in read if ":" not in reference)

    @property
    def makes(self) -> tuple[str, ...]:
        """The slots that it makes."""
        return self.info.call.results if self.op == "forward" else ()

    @property
    def gives(self) -> tuple[str, ...]:
        """The slots that it gives a gradient for."""
        if self.op not in ("backward", "backward_input"):
            return ()
        return tuple(reference for reference in self.info.call.gradients if ":" not in reference)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that it reads."""
        if self.op == "forward":
            return self.info.parameters
        return tuple(ref.removeprefix("param:") for ref in self._read_again if ref.startswith("param:"))

    @property
    def _read_again(self) -> tuple[str, ...]:
        """The arguments that a backward reads."""
        needed = self.info.weight_needed if self.op == "backward_weight" else self.info.needed
        return tuple(self.info.call.arguments[k] for k in needed or ())

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """The parameters whose gradients it gives."""
        if self.op == "forward":
            return ()
        late = {self.info.call.arguments[k].removeprefix("param:") for k in self.info.weight_wanted}
        if self.op == "backward":
            return self.info.trained
        return tuple(name for name in self.info.trained if (name in late) == (self.op == "backward_weight"))


@dataclass
class Timeline:
    """Work in order, with instructions around it: `before[k]` and `after[k]` of work k, in the order they were added."""

    work: Sequence[Work]
    before: list[list[Instruction]] = field(default_factory=list)
    after: list[list[Instruction]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = [[] for _ in self.work]
        self.after = [[] for _ in self.work]

    def instructions(self) -> list[Instruction]:
        found: list[Instruction] = []
        for work, before, after in zip(self.work, self.before, self.after):
            found += [*before, work.instruction, *after]
        return found
