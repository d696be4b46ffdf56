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
    text = None if failure is None else str(failure) or type(failure).__name__
    reports = transport.gather_objects(text)
    for rank, report in enumerate(reports):
        if report is not None:
            before = what + (f" (rank {rank})" if len(set(reports)) > 1 else "")
            raise error(f"{before}: {report}" if before else report) from failure
