"""The files that a run writes: whether it can, and that no other run writes them too."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import TrainError, WriteError
from runtime.program import Program

LOCK = "run.lock"


@dataclass(frozen=True)
class RunFiles:
    """Where a run writes. directory: its checkpoints and its lock. trace: None without one."""

    directory: Path
    log: Path
    trace: Path | None = None

    @classmethod
    def of(cls, program: Program, trace: str | Path | None = None) -> RunFiles:
        options = program.train
        directory = Path(options["directory"] or Path("runs") / program.name)
        log = Path(options["log"] or directory / "log.jsonl")
        return cls(directory, log, None if trace is None else Path(trace))

    def check(self) -> None:
        """Make the folders and touch the files, which stay as they are. Raises TrainError for what cannot be written."""
        touched = [
            (self.directory, self.directory / LOCK, "the run's folder", "train { directory = … }"),
            (self.log, self.log, "the log", "train { log = … }"),
        ]
        if self.trace is not None:
            touched.append((self.trace, self.trace, "the trace", "--trace FILE"))
        for path, file, what, option in touched:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("ab", buffering=0) as handle:
                    handle.write(b"")  # some devices open, and refuse this
            except OSError as error:
                occupied = isinstance(error, FileExistsError)  # by what is no folder
                why = f"{error.filename} is no folder" if occupied else error.strerror or str(error)
                raise TrainError(f"cannot write {what} {path}: {why}; choose another: {option}") from None

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """The folder is this run's alone while this is entered. Raises TrainError if another run has it, or for what
        cannot be written.

        The claim is a lock on an open file: it ends with the process, however that ends, and the file means nothing
        without it. Where the file system knows no locks there is no claim.
        """
        self.check()
        with (self.directory / LOCK).open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "another process"
                raise TrainError(
                    f"{self.directory} is in use by another run ({owner}); wait for it or stop it, or give this run a "
                    f"folder of its own: train {{ directory = … }}"
                ) from None
            except OSError:
                yield
                return
            with suppress(OSError):  # only what others are told is lost
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}\n")
                file.flush()
            yield


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the system become a WriteError that names the file."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror or error}") from error
