"""Errors that all ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.transport.base import Transport


@contextmanager
def together(transport: Transport, error: type[Exception], what: str) -> Iterator[None]:
    """Run the body on every rank; if it raises on any of them, raise `error` on all. Collective.

    what: begins the message, "cannot write x"; "" for none. Interrupts pass through at once.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as caught:  # Whatever it is, the other ranks must not wait in vain.
        failure = caught
    reports = transport.gather_objects(None if failure is None else _told(failure))
    for rank, report in enumerate(reports):
        if report is not None:
            alone = len(set(reports)) > 1
            before = (f"{what} (rank {rank})" if what else f"rank {rank}") if alone else what
            raise error(f"{before}: {report}" if before else report) from failure


def _told(error: Exception) -> str:
    """The message alone where it is written for people: our own, and the system's about files."""
    ours = type(error).__module__.partition(".")[0] == "runtime" or isinstance(error, OSError)
    return str(error) if ours else f"{type(error).__name__}: {error}"
