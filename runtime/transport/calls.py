"""A call on a transport as data: what error messages print, peers compare and counters count."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def describe_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """`f32[4, 8]`, as everywhere in planc."""
    name = _SHORT.get(dtype, str(dtype).removeprefix("torch."))
    return f"{name}[{', '.join(map(str, shape))}]"


@dataclass(frozen=True, slots=True)
class Call:
    """One communication call of one rank.

    group: the global ranks that take part, in order; for a message, `(source, destination)`.
    shape, dtype: of the local input (of the buffer, for a broadcast or a receive).
    asynchronous: the caller goes on and waits later.
    """

    kind: str
    group: tuple[int, ...]
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    op: str | None = None
    source: int | None = None
    tag: int | None = None
    label: str | None = None
    asynchronous: bool = False

    @property
    def label_kind(self) -> str | None:
        """The first word of the label: "reduce" of "reduce bucket 3 (step 7)"."""
        return self.label.split(maxsplit=1)[0] if self.label and self.label.strip() else None

    def __str__(self) -> str:
        parts = [describe_tensor(self.shape, self.dtype)] if self.dtype is not None else []
        parts += [self.op] if self.op else []
        parts += [f"from rank {self.source}"] if self.source is not None else []
        parts += [f"rank {self.group[0]} to rank {self.group[1]}, tag {self.tag}"] if self.tag is not None else []
        label = f" for {self.label!r}" if self.label else ""
        return f"{self.kind}({', '.join(parts)}){label}"


@dataclass(slots=True)
class Count:
    """calls: how many. bytes: sent by this rank (see `Counters`)."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.calls + other.calls, self.bytes + other.bytes)


def sent_bytes(kind: str, ranks: int, full_bytes: int) -> int:
    """Bytes that a rank sends in one call.

    They follow the bandwidth-optimal (ring) formulas, whatever the backend really does, so that they can be compared
    with a program's predicted traffic. For n ranks and a full (gathered) size of B bytes:

    | all_reduce | all_gather, reduce_scatter, all_to_all, broadcast | send | recv |
    |------------|----------------------------------------------------|------|------|
    | 2B(n−1)/n  | B(n−1)/n (a broadcast's total, shared evenly)      | B    | 0    |
    """
    match kind:
        case "all_reduce":
            return 2 * full_bytes * (ranks - 1) // ranks
        case "send":
            return full_bytes
        case "recv":
            return 0
        case _:
            return full_bytes * (ranks - 1) // ranks


class Counters:
    """Calls and bytes sent by this rank (see `sent_bytes`), for each kind and group."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[int, ...]], Count] = {}

    def add(self, kind: str, group: tuple[int, ...], full_bytes: int) -> None:
        count = self._counts.setdefault((kind, group), Count())
        count.calls += 1
        count.bytes += sent_bytes(kind, len(group), full_bytes)

    def __getitem__(self, kind: str) -> Count:
        """The sum over the groups; zero for a kind never called."""
        return sum((c for (k, _), c in self._counts.items() if k == kind), Count())

    def by_group(self) -> dict[tuple[str, tuple[int, ...]], Count]:
        """(kind, group) to its count."""
        return dict(self._counts)

    @property
    def total(self) -> Count:
        return sum(self._counts.values(), Count())

    def reset(self) -> None:
        self._counts.clear()
