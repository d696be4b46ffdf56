"""Start the processes of a job on this machine, as `torchrun --standalone` does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO

import torch.distributed as dist

from runtime.log import to_line
from runtime.transport.failure import FailureBoard, FailureReport

_STOP_SECONDS = 5.0  # between a polite SIGTERM and SIGKILL
_FINISH_SECONDS = 120.0  # the same after an interrupt, for ranks that finish their step and write a checkpoint
_QUIET_SECONDS = 2.0  # of those, until the user is told what is waited for
_FAILURE_SECONDS = 3.0  # for the other ranks to say how the first failure reached them


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun, or `launch`, has started."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def launch(processes: int, arguments: Sequence[str], env: Mapping[str, str] | None = None, json: bool = False) -> int:
    """Run `python arguments…` (say `["-m", "runtime", "build/x"]`) as `processes` ranks; the exit status.

    Rank 0 has this process's stdout and stderr. The others' stdout is dropped, and each line of their stderr is
    prefixed with the rank. When one fails, the rest are stopped, and the first failure is the last thing that is
    printed; of a rank that is killed the others learn from here. Ctrl-C and SIGTERM stop all of them (status 130 and
    143), in their own time at first and at once if repeated. OMP_NUM_THREADS is 1 unless set. `env` is added to the
    environment. json: the first failure goes to stdout, as `{"error": …}`.
    """
    if processes < 1:
        raise ValueError(f"a job needs at least one process, got {processes}")
    # The launcher hosts the store, so that it outlives every rank and its port is bound before any rank starts.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **(env or {}),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # The ranks connect to the store and do not start one.
    }
    ranks: list[subprocess.Popen[bytes]] = []
    stopping, patience = signal.SIGTERM, _STOP_SECONDS
    board = FailureBoard(store)
    with _sigterm_as_exception():
        try:
            for rank in range(processes):
                ranks.append(_start(rank, arguments, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
            status = _first_failure(ranks)
            if status:
                _report_sudden_end(ranks, board)
                _wait(ranks, _FAILURE_SECONDS)
        except (KeyboardInterrupt, _Terminated) as stop:
            stopping = signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT
            status, patience = 128 + stopping, _FINISH_SECONDS
        finally:
            _stop(ranks, stopping, patience)
    if status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        if not ranks or ranks[0].returncode < 0:  # else it has said so itself
            print("planc: interrupted", file=sys.stderr)
    elif (report := board.first()) is not None:
        # Once more: last is where one looks.
        print(to_line(error=str(report)) if json else f"planc: {report}", file=sys.stdout if json else sys.stderr)
    return status


def _report_sudden_end(ranks: Sequence[subprocess.Popen[bytes]], board: FailureBoard) -> None:
    """Say, and report in their name, which ranks could not do so: they were killed, or left by `exit`. (A rank with
    status 1 has said why.)"""
    for rank, code in enumerate([process.poll() for process in ranks]):
        reason = None
        if code is not None and code < 0:
            memory = ", as by the system for want of memory" if code == -signal.SIGKILL else ""
            reason = f"it was killed ({signal.Signals(-code).name}{memory})"
        elif code is not None and code > 1:
            reason = f"it ended with status {code}"
        if reason is not None and board.first() is None:
            board.report(report := FailureReport(rank, None, reason))
            print(f"planc: {report}", file=sys.stderr, flush=True)


def _start(rank: int, arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, *arguments]
    # A session of its own: the terminal's Ctrl-C reaches the launcher alone, which then stops the ranks in order.
    if rank == 0:
        return subprocess.Popen(command, env=env, start_new_session=True)
    process = subprocess.Popen(
        command, env=env, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    threading.Thread(target=_forward, args=(process.stderr, rank), daemon=True).start()
    return process


def _forward(stream: IO[bytes], rank: int) -> None:
    for line in stream:
        text = line.decode(errors="replace")
        sys.stderr.write(text if text.startswith(f"planc: rank {rank} ") else f"[rank {rank}] {text}")
        sys.stderr.flush()


def _first_failure(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks, or for one that fails; its exit status (128 + signal number if killed), or 0."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return failed if failed > 0 else 128 - failed
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _wait(ranks: list[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(process.poll() is None for process in ranks):
        time.sleep(0.05)


def _stop(ranks: list[subprocess.Popen[bytes]], first: signal.Signals, patience: float) -> None:
    """`first`, the signal that this process got; after `patience` seconds, or another interrupt, SIGKILL."""
    for stop, seconds in ((first, patience), (signal.SIGKILL, _STOP_SECONDS)):
        running = [process for process in ranks if process.poll() is None]
        for process in running:
            process.send_signal(stop)
        try:
            if running and seconds == _FINISH_SECONDS:
                _wait(running, _QUIET_SECONDS)
                if any(process.poll() is None for process in running):
                    print("planc: stopping after this step; Ctrl-C again: at once", file=sys.stderr)
            if running:
                _wait(running, seconds)
        except (KeyboardInterrupt, _Terminated):
            continue


class _Terminated(Exception):
    """The launcher received SIGTERM."""


@contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    """So that the ranks are stopped. Signal handlers exist in the main thread only; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
