"""This process's place in a job."""

from __future__ import annotations

import torch

from runtime.transport.base import Transport
from runtime.transport.launch import under_torchrun
from runtime.transport.local import LocalTransport
from runtime.transport.torch_distributed import TorchTransport


def connect(device: torch.device | str | None = None) -> Transport:
    """The transport of this process: of the job that torchrun (or `launch`) started it for, else of a world of one.

    device: of a world of one; by default CUDA where there is any. Raises TransportError.
    """
    if under_torchrun():
        return TorchTransport.from_env()
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return LocalTransport(device)
