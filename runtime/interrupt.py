"""Ctrl-C and SIGTERM as a request: the run ends after a whole step, at the same one on every rank."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from runtime.transport import Transport

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, the first signal is kept for `agreed`, and the second raises KeyboardInterrupt at once.

    Signal handlers exist in the main thread only: elsewhere (in a simulated rank) nothing is caught.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._everyone = tuple(range(transport.size))
        self._flag = torch.zeros((), dtype=torch.int32, device=transport.device)
        self._received = 0
        self._before: dict[int, Any] = {}
        transport.prepare([self._everyone])

    def agreed(self) -> int:
        """The number of a signal that any rank has received, the same on all ranks, or 0. Collective.

        A signal reaches the ranks at different moments: without this, some would wait in the next step for others that
        have ended.
        """
        self._flag.fill_(self._received)
        self._transport.all_reduce(self._flag, self._everyone, "max", label="agree whether to go on")
        return int(self._flag)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            raise KeyboardInterrupt
        self._received = number

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
