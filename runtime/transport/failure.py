"""How the processes of a job learn which rank failed first, and what a late rank is doing.

A board in the job's key-value store holds the first failure report and, on request, what each rank is doing. Every
process has a watch thread that reads it: it answers requests while the main thread computes, and ends a process that
is stuck (in a device kernel, or waiting for a rank that is no member of its groups) after another rank has failed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch.distributed as dist

_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class FailureReport:
    """rank: who failed first. label: what it was doing. reason: its error, as text."""

    rank: int
    label: str | None
    reason: str

    def __str__(self) -> str:
        where = f" in {self.label!r}" if self.label else ""
        return f"rank {self.rank} failed{where}: {self.reason}"


class FailureBoard:
    """The shared board. Used by one thread: others `clone` it."""

    def __init__(self, store: dist.Store) -> None:
        self._root = store
        self._store = dist.PrefixStore("planc", store)

    def clone(self) -> FailureBoard:
        return FailureBoard(self._root.clone())

    def claim(self, rank: int) -> bool:
        """Whether this rank is the first to ask: of several that fail at once, one tells the user before it reports."""
        return self._store.compare_set("claimed", "", str(rank)) == str(rank).encode()

    def report(self, report: FailureReport) -> None:
        """Post it, unless an earlier one is there."""
        self._store.compare_set("failure", "", json.dumps(asdict(report)))

    def first(self, within: float = 0.0) -> FailureReport | None:
        """The first failure; waits up to `within` seconds for one."""
        end = time.monotonic() + within
        while not self._store.check(["failure"]):
            if time.monotonic() >= end:
                return None
            time.sleep(0.05)
        return FailureReport(**json.loads(self._store.get("failure")))

    def ask(self, ranks: Iterable[int]) -> dict[int, str | None]:
        """What each of the ranks is doing; those that do not answer are left out."""
        self._store.set("asked", "1")
        time.sleep(3 * _POLL_SECONDS)
        answers = {rank: f"doing/{rank}" for rank in ranks}
        return {rank: json.loads(self._store.get(key)) for rank, key in answers.items() if self._store.check([key])}

    def answer(self, rank: int, doing: str | None) -> None:
        """Post what this rank does, if some rank has asked."""
        if self._store.check(["asked"]):
            self._store.set(f"doing/{rank}", json.dumps(doing))


class Watch:
    """The thread described above. grace: seconds between a failure elsewhere and the end of a stuck process."""

    def __init__(self, board: FailureBoard, rank: int, doing: Callable[[], str | None], grace: float = 10.0) -> None:
        self._board = board
        self._rank = rank
        self._doing = doing
        self._grace = grace
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="planc watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            message: str | None = None
            try:
                self._board.answer(self._rank, self._doing())
                report = self._board.first()
                message = str(report) if report else None
            except RuntimeError:  # torch's DistError: whoever hosted the store has ended.
                message = "the job's key-value store is gone: rank 0 or the launcher has ended"
            if message is not None:
                if not self._stop.wait(self._grace):
                    print(f"planc: rank {self._rank} ends in {self._doing()!r} because {message}", file=sys.stderr)
                    sys.stderr.flush()
                    os._exit(1)  # The main thread is stuck in C++ or on a device; nothing gentler reaches it.
                return
