"""What happens on a rank while it runs an instruction, as the memory, traffic and time readers see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allocate:
    """A storage comes into being. `line`: of the segment's code (0 outside of it)."""

    storage: int
    bytes: int
    line: int


@dataclass(frozen=True, slots=True)
class Release:
    """A storage goes. `category`: what it was, None for one of this very instruction."""

    storage: int
    bytes: int
    category: str | None


@dataclass(frozen=True, slots=True)
class Compute:
    """An operator runs: floating-point operations in `dtype`, and bytes that it reads and writes."""

    op: str
    flops: int
    bytes: int
    dtype: str
    line: int


@dataclass(frozen=True, slots=True)
class Communicate:
    """A collective or a message starts. `axes`: the mesh axes that its group spans; `full`: bytes of the whole
    (gathered) value; `sent`: bytes that this rank sends (`runtime.transport.calls.sent_bytes`); `storages`: what it
    reads and writes. If it is not `asynchronous` the rank waits for it at once."""

    number: int
    kind: str
    axes: tuple[str, ...]
    ranks: int
    full: int
    sent: int
    asynchronous: bool
    storages: tuple[int, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The rank waits for the communication of this number."""

    number: int


Event = Allocate | Release | Compute | Communicate | Wait
