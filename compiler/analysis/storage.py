"""Which memory is alive, byte for byte: storages counted where operators make them.

A `StorageTracker` sees every operator at the dispatcher. A storage counts from the operator that makes it until the
last tensor on it goes, whatever views there are, so what it says is what an allocator gives out (before its own
rounding), without the workspace that a kernel takes and gives back within one operator.

Operators run on tensors of device "meta", which have shapes, strides and storages but no data. Where a program looks at
a value, it sees 1 (true).
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compiler.analysis.events import Allocate, Event, Release
from compiler.analysis.work import work_of

_ATEN = torch.ops.aten
_READS = {_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.is_nonzero.default}


@dataclass(slots=True, eq=False)
class Storage:
    """A storage: its number, its bytes, its category once it has one, and whether it is still alive."""

    number: int
    bytes: int
    category: str | None = None
    alive: bool = True


class StorageTracker(TorchDispatchMode):
    """While it is entered, counts storages and writes what happens into chunks of events.

    `bytes` are the live bytes by category; `fresh` are the live storages that have none yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.fresh: dict[int, Storage] = {}
        self._live: dict[int, Storage] = {}
        self._made = 0
        self._chunks: list[Sequence[Event]] = []
        self._open: list[Event] | None = None
        self._code = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = run_without_data(func, args, kwargs or {})
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor) and item.device.type == "meta":
                self.see(item)
        if self._open is not None and (work := work_of(func, args, kwargs or {}, result, self.line())) is not None:
            self._open.append(work)
        return result

    def see(self, tensor: Tensor) -> Storage:
        """The tensor's storage; a new one counts from now on."""
        memory = tensor.untyped_storage()
        known = self._live.get(memory._cdata)
        if known is not None:
            return known
        self._made += 1
        return self._count(memory, Storage(self._made, memory.nbytes()))

    def again(self, number: int, size: int) -> torch.UntypedStorage:
        """A storage of `size` bytes that stands for one of this number which was recorded."""
        memory = torch.UntypedStorage(size, device="meta")
        self._count(memory, Storage(number, size))
        return memory

    def _count(self, memory: torch.UntypedStorage, storage: Storage) -> Storage:
        key = memory._cdata
        self._live[key] = self.fresh[storage.number] = storage
        weakref.finalize(memory, self._released, key).atexit = False
        self.record(Allocate(storage.number, storage.bytes, self.line()))
        return storage

    def _released(self, key: int) -> None:
        storage = self._live.pop(key)
        storage.alive = False
        if storage.category is None:
            del self.fresh[storage.number]
        else:
            self.bytes[storage.category] -= storage.bytes
        self.record(Release(storage.number, storage.bytes, storage.category))

    def tag(self, category: str, tensors: Any = None) -> None:
        """Give a category to the storages of `tensors` (nested), or to all that have none; the first one stays."""
        given = [self.see(item) for item in tree_leaves(tensors) if isinstance(item, Tensor)]
        for storage in list(self.fresh.values()) if tensors is None else given:
            if storage.category is None:
                storage.category = category
                self.fresh.pop(storage.number, None)
                self.bytes[category] += storage.bytes

    # -- events --------------------------------------------------------------------------------------------------

    def record(self, event: Event) -> None:
        if self._open is not None:
            self._open.append(event)

    @contextmanager
    def into(self, chunks: list[Sequence[Event]]) -> Iterator[None]:
        """Write chunks of events to this list meanwhile."""
        self._chunks, self._open = chunks, []
        chunks.append(self._open)
        try:
            yield
        finally:
            self._open = None

    @contextmanager
    def chunk(self, events: list[Event], code: str) -> Iterator[None]:
        """Events of the generated code `code` go to a chunk of their own."""
        self._chunks.append(events)
        self._open, self._code = events, code
        try:
            yield
        finally:
            self._code, self._open = "", []
            self._chunks.append(self._open)

    @contextmanager
    def aside(self, events: list[Event] | None, code: str = "") -> Iterator[None]:
        """What happens meanwhile is no part of the step: it goes to `events`, if anywhere."""
        before, self._open, self._code = self._open, events, code
        try:
            yield
        finally:
            self._open, self._code = before, ""

    def write(self, events: Sequence[Event]) -> None:
        """A chunk of events that others may share."""
        self._chunks.append(events)
        self._open = []
        self._chunks.append(self._open)

    def line(self) -> int:
        """The line of the generated code that runs; 0 outside of it."""
        frame = sys._getframe() if self._code else None
        while frame is not None and frame.f_code.co_filename != self._code:
            frame = frame.f_back
        return frame.f_lineno if frame is not None else 0


def run_without_data(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on tensors without data. One that only writes does nothing; one that reads a value finds 1."""
    schema = func._schema
    if schema.is_mutable and not schema.returns:
        return None
    if args and isinstance(args[0], Tensor) and args[0].device.type == "meta":
        if func in _READS:
            return torch.ones((), dtype=args[0].dtype).item() if func is _ATEN._local_scalar_dense.default else True
        if func is _ATEN._to_copy.default and str(kwargs.get("device", "meta")) == "cpu":
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    return func(*args, **kwargs)
