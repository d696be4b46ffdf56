"""Copies between a device and the host's memory, behind computation.

On CUDA they run on a stream of their own, from and to pinned memory. Elsewhere host and device are one: they are plain
copies, so that the same program runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.transport.base import Finished, Work

HOST = torch.device("cpu")


class Transfer:
    """The copies of one rank."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies can reach while the device computes."""
        device = self.device if self.device.type == "meta" else HOST
        return torch.zeros(numel, dtype=dtype, device=device, pin_memory=self.stream is not None)

    def start(self, target: Tensor, source: Tensor) -> Work:
        """Copy `source` into `target`, one of them on the host. Neither may be touched before the work is waited for."""
        if self.stream is None:
            target.copy_(source)
            return Finished()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return Copying(event, to_host=target.device.type == "cpu")


class Copying(Work):
    """A copy under way: the device's stream waits for what comes to it, the host for what comes to the host."""

    def __init__(self, event: torch.cuda.Event, to_host: bool):
        self.event, self.to_host = event, to_host

    def wait(self) -> None:
        if self.to_host:
            self.event.synchronize()
        else:
            torch.cuda.current_stream().wait_event(self.event)
