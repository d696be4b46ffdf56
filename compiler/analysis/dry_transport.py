"""A transport that moves nothing and writes down what it is asked to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from compiler.analysis.events import Communicate, Wait
from compiler.analysis.storage import StorageTracker
from runtime.mesh import Mesh
from runtime.transport.base import Finished, Group, Transport, Work
from runtime.transport.calls import Call, sent_bytes


class DryTransport(Transport):
    """A rank among others that are not there. Results are whatever their tensors are."""

    backend = "dry"

    def __init__(self, rank: int, mesh: Mesh, tracker: StorageTracker):
        super().__init__(rank, mesh.size, torch.device("meta"), timeout=None)
        self.mesh, self.tracker = mesh, tracker
        self._numbers = itertools.count()
        self._axes: dict[Group, tuple[str, ...]] = {}

    def axes(self, group: Group) -> tuple[str, ...]:
        """The mesh axes on which the members of a group differ."""
        if group not in self._axes:
            points = [self.mesh.coords(rank) for rank in group]
            self._axes[group] = tuple(n for n in self.mesh.names if len({point[n] for point in points}) > 1)
        return self._axes[group]

    def _count(self, call: Call, full: Tensor) -> None:
        super()._count(call, full)
        self._full = full.numel() * full.element_size()

    def _record(self, call: Call, /, *tensors: Tensor) -> Work:
        number, full = next(self._numbers), self._full
        storages = tuple(self.tracker.see(tensor).number for tensor in tensors)
        sent, axes = sent_bytes(call.kind, len(call.group), full), self.axes(call.group)
        self.tracker.record(
            Communicate(
                number, call.kind, call.group, axes, full, sent, call.asynchronous, storages, self.tracker.line()
            )
        )  # fmt: skip
        return DryWork(self.tracker, number, tensors) if call.asynchronous else Finished()

    _all_reduce = _all_gather = _reduce_scatter = _all_to_all = _broadcast = _send = _recv = _record

    def prepare(self, groups: Iterable[Group]) -> None:
        return

    def barrier(self, label: str | None = None) -> None:
        return

    def gather_objects(self, obj: Any) -> list[Any]:
        return [obj] * self.size

    def abort(self, reason: str) -> None:
        return

    def close(self) -> None:
        return


class DryWork(Work):
    """Under way until it is waited for; so long it holds the tensors that it reads and writes."""

    def __init__(self, tracker: StorageTracker, number: int, tensors: tuple[Tensor, ...]):
        self.tracker, self.number, self.held = tracker, number, tensors

    def wait(self) -> None:
        if self.held:
            self.held = ()
            self.tracker.record(Wait(self.number))
