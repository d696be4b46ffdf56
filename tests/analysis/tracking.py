"""What a simulated rank really allocates: every storage that the dispatcher sees, counted while it lives."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from runtime.executor import load_kinds
from runtime.initial import initial_state
from runtime.instructions import Instruction
from runtime.program import Program
from runtime.session import Session
from runtime.transport import Transport, run_ranks
from runtime.transport.calls import Count
from runtime.transport.in_process import InProcessTransport, InProcessWork


class Storages(TorchDispatchMode):
    """Live bytes now, and the most so far, but for the storages of `others`. Each rank is a thread with a mode of its
    own."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        super().__init__()
        self.live: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in others}
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.count(tensor.untyped_storage())
        self.most = max(self.most, self.now)
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.live:
            self.live[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self.release, storage._cdata)

    def release(self, key: int) -> None:
        self.now -= self.live.pop(key)


@dataclass
class Observed:
    """The second step of a rank: (instruction, live bytes before it, most bytes during it) for each instruction, and
    (kind, group) → calls and bytes sent."""

    moments: list[tuple[Instruction, int, int]]
    counts: dict[tuple[str, tuple[int, ...]], Count]


def observe(program: Program, batch: Mapping[str, Tensor]) -> list[Observed]:
    """Simulate two steps, and tell what each rank did in the second."""
    full = initial_state(program, 0)
    kinds = load_kinds(program)

    def body(transport: Transport) -> Observed:
        with Storages(full.values()) as storages, Session(program, transport, full, kinds) as session:
            moments: list[tuple[Instruction, int, int]] = []

            def watched(action):  # type: ignore[no-untyped-def]
                def run(instruction: Instruction) -> None:
                    before = storages.most = storages.now
                    action(instruction)
                    moments.append((instruction, before, storages.most))

                return run

            executor = session.executor
            executor.actions = {op: watched(action) for op, action in executor.actions.items()}
            for _ in range(2):
                moments.clear()
                transport.counters.reset()
                session.step(batch)
            return Observed(moments, transport.counters.by_group())

    with uncounted_transport():
        return run_ranks(program.world, body)


@contextmanager
def uncounted_transport() -> Iterator[None]:
    """The simulator's own copies are no memory of the program, and what it reads it does not keep."""
    start, wait = InProcessTransport._start, InProcessWork.wait

    def hidden_start(self, call, arrival, *rest):  # type: ignore[no-untyped-def]
        with _disable_current_modes():
            if arrival.tensor is not None and not call.asynchronous:
                arrival.tensor = arrival.tensor.clone()
            return start(self, call, arrival, *rest)

    def hidden_wait(self):  # type: ignore[no-untyped-def]
        with _disable_current_modes():
            wait(self)

    with patch.object(InProcessTransport, "_start", hidden_start), patch.object(InProcessWork, "wait", hidden_wait):
        yield
