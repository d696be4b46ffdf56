"""The meeting place of ranks that are threads of one process.

A communication is a `Slot`: its members arrive in any order; the last to arrive checks that all agree and computes the
result (in group order, so nothing depends on timing); each member copies its part out when it waits. One lock guards
everything but that computation, and each rank sleeps on a condition of its own, so an arrival wakes only who awaits it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.transport.calls import Call
from runtime.transport.errors import CollectiveMismatch, Deadlock, PeerFailure, TransportError, WaitTimeout


@dataclass(slots=True)
class Arrival:
    """One member's call, and its input (None where it only receives). `payload`: gather_objects' JSON text."""

    call: Call
    tensor: Tensor | None = None
    payload: str | None = None


@dataclass(slots=True)
class Slot:
    """One communication.

    number: which it is among those of the same group, from 1.
    combine: computes `result` from the arrivals in group order, once all are there.
    """

    members: tuple[int, ...]
    number: int
    combine: Callable[[list[Arrival]], object]
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    done: bool = False
    result: object = None
    error: Exception | None = None

    def ordered(self) -> list[Arrival]:
        return [self.arrivals[rank] for rank in self.members]


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a world. cause: the rank's own exception. message: for the other ranks."""

    rank: int
    label: str | None
    cause: BaseException
    message: str


class World:
    """The state that `size` in-process ranks share. timeout: the bound of each wait in seconds, None for none.

    Use None when ranks stop at breakpoints. A deadlock is found at once, whatever the bound.
    """

    def __init__(self, size: int, timeout: float | None = 60.0) -> None:
        if size < 1:
            raise TransportError(f"a world needs at least one rank, got {size}")
        self.size = size
        self.timeout = timeout
        self.failure: Failure | None = None
        self._lock = threading.Lock()
        self._wake = [threading.Condition(self._lock) for _ in range(size)]
        self._ended = threading.Condition(self._lock)
        self._slots: dict[Hashable, Slot] = {}
        self._waiting: list[tuple[Slot, Call] | None] = [None] * size
        self._doing: list[Callable[[], str | None]] = [lambda: None] * size
        self._blocked = 0
        self._finished: set[int] = set()

    def watch(self, rank: int, doing: Callable[[], str | None]) -> None:
        """Let reports ask `doing` for what the rank does now."""
        self._doing[rank] = doing

    # -- communication -------------------------------------------------------------------------------------------

    def arrive(
        self,
        rank: int,
        members: tuple[int, ...],
        stream: Hashable,
        number: int,
        arrival: Arrival,
        combine: Callable[[list[Arrival]], object],
    ) -> Slot:
        """Enter the `number`-th communication of `stream` (a group, or a pair of message ends). Never blocks."""
        key = (stream, number)
        with self._lock:
            self._raise_failure(rank, arrival.call)
            slot = self._slots.setdefault(key, Slot(members, number, combine))
            slot.arrivals[rank] = arrival
            if len(slot.arrivals) < len(members):
                return slot
            del self._slots[key]
        try:
            _check_agreement(slot)
            with torch.no_grad():
                slot.result = slot.combine(slot.ordered())
        except Exception as error:  # Every member raises it, in its own wait.
            slot.error = error
        with self._lock:
            slot.done = True
            for member in members:
                waiting = self._waiting[member]
                if waiting is not None and waiting[0] is slot:
                    self._waiting[member] = None
                    self._blocked -= 1
                    self._wake[member].notify()
        return slot

    def wait(self, rank: int, slot: Slot, call: Call) -> object:
        """Block until the slot is done; its result."""
        with self._lock:
            if not slot.done:
                self._raise_failure(rank, call)
                self._waiting[rank] = (slot, call)
                self._blocked += 1
                self._find_deadlock()
                self._sleep(rank, slot, call)
        if isinstance(slot.error, CollectiveMismatch):
            raise CollectiveMismatch(str(slot.error))  # One exception object per thread: tracebacks are mutable.
        if slot.error is not None:
            raise TransportError(f"{call}: {slot.error}") from slot.error
        return slot.result

    def _sleep(self, rank: int, slot: Slot, call: Call) -> None:
        started = time.monotonic()
        while not slot.done:
            left = None if self.timeout is None else started + self.timeout - time.monotonic()
            expired = left is not None and left <= 0
            if self.failure is not None or expired:
                report = self._report(rank, slot, call) if self.failure is None else ""
                self._waiting[rank] = None
                self._blocked -= 1
                self._raise_failure(rank, call)
                raise WaitTimeout(f"rank {rank} waited {self.timeout:g} s for {call}\n{report}")
            self._wake[rank].wait(left)

    # -- failure -------------------------------------------------------------------------------------------------

    def fail(self, rank: int, cause: BaseException, label: str | None) -> None:
        """Record the failure of a rank, unless another was first, and release all ranks."""
        where = f" in {label!r}" if label else ""
        with self._lock:
            self._set_failure(
                Failure(rank, label, cause, f"rank {rank} failed{where}: {type(cause).__name__}: {cause}")
            )

    def finish(self, rank: int) -> None:
        """The rank has returned, or raised: whoever waits for it waits in vain."""
        with self._lock:
            self._finished.add(rank)
            self._find_deadlock()
            self._ended.notify_all()

    def join(self, timeout: float | None) -> bool:
        """Wait until every rank has finished or one has failed; False if neither happened within `timeout` seconds."""
        with self._lock:
            return self._ended.wait_for(lambda: self.failure is not None or self._all_finished(), timeout)

    def join_all(self, timeout: float | None) -> bool:
        """Wait until every rank has finished; False if `timeout` seconds did not suffice."""
        with self._lock:
            return self._ended.wait_for(self._all_finished, timeout)

    def unfinished(self) -> list[int]:
        with self._lock:
            return sorted(set(range(self.size)) - self._finished)

    def _all_finished(self) -> bool:
        return len(self._finished) == self.size

    def _set_failure(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            for condition in self._wake:
                condition.notify_all()
            self._ended.notify_all()

    def _raise_failure(self, rank: int, call: Call) -> None:
        failure = self.failure
        if failure is None:
            return
        if isinstance(failure.cause, Deadlock):
            raise Deadlock(str(failure.cause))
        raise PeerFailure(failure.message, rank, str(call)) from None

    def _find_deadlock(self) -> None:
        """If no rank can move any more, fail all at once instead of letting them sit out the timeout."""
        if self._blocked == 0 or self._blocked + len(self._finished) < self.size or self.failure is not None:
            return
        first = next(rank for rank, waiting in enumerate(self._waiting) if waiting is not None)
        lines = "\n".join(f"  rank {rank}: {self._state(rank)}" for rank in range(self.size))
        cause = Deadlock(f"no rank can continue:\n{lines}")
        self._set_failure(Failure(first, self._doing[first](), cause, str(cause)))

    # -- reports -------------------------------------------------------------------------------------------------

    def _report(self, rank: int, slot: Slot, call: Call) -> str:
        present = ", ".join(str(member) for member in slot.members if member in slot.arrivals)
        absent = [member for member in slot.members if member not in slot.arrivals]
        lines = [f"  call {slot.number} of group {slot.members}; arrived: rank {present}"]
        lines += [f"  rank {member} did not arrive: {self._state(member)}" for member in absent]
        return "\n".join(lines)

    def _state(self, rank: int) -> str:
        waiting = self._waiting[rank]
        if rank in self._finished:
            return "it has ended"
        if waiting is None:
            doing = self._doing[rank]()
            return f"it is running, in {doing!r}" if doing else "it is running"
        slot, call = waiting
        missing = ", ".join(str(member) for member in slot.members if member not in slot.arrivals)
        return f"it waits for rank {missing} in {call} (call {slot.number} of group {slot.members})"


def _check_agreement(slot: Slot) -> None:
    calls = [arrival.call for arrival in slot.ordered()]
    label_kinds: set[str | None] = set()
    facts: set[tuple[object, ...]]
    if calls[0].tag is not None:
        # A message: by construction its slot's first member only sends, and its second only receives.
        facts = {(call.shape, call.dtype, call.tag) for call in calls}
    else:
        facts = {(call.kind, call.shape, call.dtype, call.op, call.source) for call in calls}
        label_kinds = {call.label_kind for call in calls} - {None}
    if len(facts) > 1 or len(label_kinds) > 1:
        lines = "\n".join(f"  rank {rank}: {call}" for rank, call in zip(slot.members, calls, strict=True))
        raise CollectiveMismatch(f"call {slot.number} of group {slot.members} differs between its members:\n{lines}")
