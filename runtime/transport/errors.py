"""What can go wrong between ranks. Every message names ranks and the labels of what they were doing."""

from __future__ import annotations


class TransportError(RuntimeError):
    """Misuse of a transport, or the root of the errors below."""


class CollectiveMismatch(TransportError):
    """The members of one collective (or the two ends of a message) disagree on what they call."""


class WaitTimeout(TransportError):
    """Something awaited did not happen within the transport's bound."""


class ConnectionLost(TransportError):
    """Another rank has ended without a word: killed, or its machine is gone."""


class Deadlock(TransportError):
    """Every rank that still runs waits for another: no one can ever continue (in-process only)."""


class PeerFailure(TransportError):
    """Another rank failed first; this rank stops because of it.

    first: what that rank reported. stopped: what this rank was at, "all_reduce(…) for '…'".
    """

    def __init__(self, first: str, rank: int, stopped: str) -> None:
        super().__init__(f"{first}\n(rank {rank} stopped at {stopped})")
        self.first = first
        self.stopped = stopped


class RankFailure(TransportError):
    """A rank of `run_ranks` failed first. `__cause__` is its own exception.

    rank: the rank that failed first. label: what it was doing, or None.
    """

    def __init__(self, rank: int, label: str | None, cause: BaseException) -> None:
        where = f" in {label!r}" if label else ""
        super().__init__(f"rank {rank} failed{where}: {type(cause).__name__}: {cause}")
        self.rank = rank
        self.label = label
