"""A world of one rank: every collective is a copy or nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from runtime.transport.base import Group, Transport, Work
from runtime.transport.calls import Call
from runtime.transport.errors import TransportError


class LocalTransport(Transport):
    """One rank alone. The base class handles groups of one, so nothing ever reaches this backend."""

    backend = "local"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(0, 1, torch.device(device), timeout=None)

    def prepare(self, groups: Iterable[Group]) -> None:
        for group in groups:
            if group != (0,):
                raise TransportError(f"a local world has only rank 0, not the group {group}")

    def barrier(self, label: str | None = None) -> None:
        return

    def gather_objects(self, obj: Any) -> list[Any]:
        return [json.loads(json.dumps(obj))]

    def abort(self, reason: str) -> None:
        return

    def close(self) -> None:
        return

    def _nobody(self, call: Call, /, *tensors: Tensor) -> Work:
        raise TransportError(f"{call}: a local world has no other rank")

    _all_reduce = _all_gather = _reduce_scatter = _all_to_all = _broadcast = _send = _recv = _nobody
