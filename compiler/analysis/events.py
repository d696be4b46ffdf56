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
    """A collective or a message starts. `group`: the ranks that take part, of a message (source, destination); `axes`:
    the mesh axes on which they differ; `full`: bytes of the whole (gathered) value; `sent`: bytes that this rank sends
    (`runtime.transport.calls.sent_bytes`); `storages`: what it reads and writes. If it is not `asynchronous` the rank
    waits for it at once."""

    number: int
    kind: str
    group: tuple[int, ...]
    axes: tuple[str, ...]
    full: int
    sent: int
    asynchronous: bool
    storages: tuple[int, ...]
    line: int

    @property
    def is_message(self) -> bool:
        return self.kind in ("send", "recv")


@dataclass(frozen=True, slots=True)
class Wait:
    """The rank waits for the communication of this number."""

    number: int


Event = Allocate | Release | Compute | Communicate | Wait
