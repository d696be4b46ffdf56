"""What a run shows: one line that is redrawn on a terminal, or a plain line now and then elsewhere."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import torch

from runtime.log import to_line

_SMOOTHING = 0.1  # weight of the newest step in the averages of step time and rate


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step has to tell.

    step: counted from 1. items: tokens or samples of the whole global batch. seconds: the step's duration.
    grad_norm: None where it is not computed.
    """

    step: int
    loss: float
    items: int
    seconds: float
    grad_norm: float | None = None
    lr: float | None = None


class Progress:
    """The progress line of a run of `total` steps; use on rank 0 only, and close it.

    unit: of `items`, "tokens" or "samples". start: steps done before (a resumed run). every: steps between plain lines
    where the stream is no terminal (the first and the last step are always shown). device: whose memory is shown.
    """

    def __init__(
        self,
        total: int,
        unit: str = "tokens",
        start: int = 0,
        every: int = 10,
        stream: TextIO | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._total = total
        self._unit = unit
        self._every = every
        self._stream = stream or sys.stdout
        self._device = torch.device(device)
        self._done = start
        self._shown = -1
        self._seconds: float | None = None
        self._rate: float | None = None
        self._line = ""
        self._live = _live_line(self._stream)

    def update(self, report: StepReport) -> None:
        """Show a finished step."""
        self._done = report.step
        self._seconds = _smooth(self._seconds, report.seconds)
        self._rate = _smooth(self._rate, report.items / max(report.seconds, 1e-9))
        self._line = self._text(report)
        if self._live is not None:
            self._live.show(self._line)
        elif self._shown < 0 or self._done % self._every == 0 or self._done == self._total:
            self._print_line()

    def message(self, text: str) -> None:
        """Print a line above the progress line."""
        if self._live is not None:
            self._live.print(text)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._line and self._shown != self._done:
            self._print_line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _print_line(self) -> None:
        print(self._line, file=self._stream, flush=True)
        self._shown = self._done

    def _text(self, report: StepReport) -> str:
        assert self._seconds is not None and self._rate is not None
        parts = [
            f"step {self._done}/{self._total}",
            f"loss {report.loss:.4f}",
            f"{_scaled(self._rate)} {self._unit}/s",
            f"{self._seconds * 1e3:.0f} ms/step",
            f"{memory_bytes(self._device) / 2**30:.2f} GiB",
        ]
        if report.grad_norm is not None:
            parts.append(f"norm {report.grad_norm:.3g}")
        if report.lr is not None:
            parts.append(f"lr {report.lr:.3g}")
        parts.append(f"ETA {_clock((self._total - self._done) * self._seconds)}")
        return "  ".join(parts)


class MessageLines(Progress):
    """The same for machines: the steps are told by the log's echo, and a message is a line of JSON."""

    def update(self, report: StepReport) -> None:
        pass

    def message(self, text: str) -> None:
        print(to_line(message=text), file=self._stream, flush=True)


def memory_bytes(device: torch.device) -> int:
    """The peak of allocated device memory on CUDA; on CPU the process's resident memory now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    # No procfs (macOS): the peak, in bytes there.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class _LiveLine:
    """A line that rich redraws in place. Raises ImportError without rich: the runtime itself needs only torch."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._text = partial(Text, no_wrap=True, overflow="ellipsis")
        self._live = Live(console=Console(file=stream, highlight=False, markup=False), refresh_per_second=8)
        self._live.start()

    def show(self, line: str) -> None:
        self._live.update(self._text(line))

    def print(self, text: str) -> None:
        self._live.console.print(text)

    def stop(self) -> None:
        self._live.stop()


def _live_line(stream: TextIO) -> _LiveLine | None:
    try:
        return _LiveLine(stream) if stream.isatty() else None
    except ImportError:
        return None


def _smooth(average: float | None, value: float) -> float:
    return value if average is None else average + _SMOOTHING * (value - average)


def _scaled(value: float) -> str:
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.4g}G"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
