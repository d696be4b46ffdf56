"""The clock that a compile is timed with."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Times stages, and keeps the garbage collector out of them: a full collection over the millions of objects that
    torch.export leaves costs more than a whole stage, and the stages make little garbage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start, collecting = time.perf_counter(), gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()
            self.seconds[stage] = time.perf_counter() - start
