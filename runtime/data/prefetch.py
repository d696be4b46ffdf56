"""A background thread that computes ahead, by a bounded number of items."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """`next()` gives what `produce()` returns, call by call, computed up to `depth` items ahead.

    An exception of `produce` is raised by the `next()` that would have given its item, and by all later ones.
    `close` waits for the call under way and may be called twice.
    """

    def __init__(self, produce: Callable[[], T], depth: int, name: str = "prefetch") -> None:
        if depth < 1:
            raise ValueError(f"the depth must be at least 1, got {depth}")
        self._produce = produce
        self._depth = depth
        self._items: deque[T] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def next(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._error is not None or self._closed)
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            if not self._items:
                assert self._error is not None
                raise self._error
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._items.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
                if self._closed:
                    return
            try:
                item = self._produce()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._items.append(item)
                self._changed.notify_all()
