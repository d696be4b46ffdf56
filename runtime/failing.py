"""What a rank says when it fails: the first to fail gives the cause, those that only followed a line each."""

from __future__ import annotations

import atexit
import os
import sys
import traceback

from runtime.data import DataError
from runtime.errors import WriteError
from runtime.executor import InstructionError
from runtime.transport import ConnectionLost, PeerFailure, Transport, WaitTimeout
from runtime.transport.failure import FailureReport


def failed(transport: Transport, error: BaseException) -> None:
    """Say on stderr why this rank ends, and let the other ranks know.

    The first of all ranks to fail tells what it was doing and its error, with the traceback, before the others hear of
    it. Any other rank stops because of that, or fails at the same moment: it says so in one line.
    """
    peer = peer_failure(error)
    if peer is not None:
        say(f"planc: rank {transport.rank} stopped at {peer.stopped}: {first_line(peer.first)}")
        return
    cause = cause_of(error)
    report = FailureReport(transport.rank, transport.doing, f"{type(cause).__name__}: {cause}")
    if not transport.claims():
        say(f"planc: rank {transport.rank} failed too: {first_line(report.reason)}")
    elif isinstance(cause, (ConnectionLost, WaitTimeout, WriteError, DataError)):  # the text says it all
        say(f"planc: {report}")
    else:
        say(f"planc: {report}\n{''.join(traceback.format_exception(cause)).rstrip()}")
    transport.abort(report.reason)


def leave(status: int) -> int:
    """The exit status of a rank's process; one that was stopped or has failed ends here and now.

    Behind a failure communication may be stuck, and threads of gloo abort an interpreter that ends around them.
    """
    if status:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def peer_failure(error: BaseException | None) -> PeerFailure | None:
    """The failure of another rank that is behind an error, if there is one."""
    while error is not None and not isinstance(error, PeerFailure):
        error = error.__cause__
    return error


def cause_of(error: BaseException) -> BaseException:
    """The error itself: what an instruction adds to it, the report of the rank has."""
    return error.__cause__ if isinstance(error, InstructionError) and error.__cause__ is not None else error


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
