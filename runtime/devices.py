"""What kind of device a tensor is on: that decides the kernels."""

from __future__ import annotations

from contextvars import ContextVar

import torch

STANDS_FOR: ContextVar[str] = ContextVar("stands_for", default="cpu")
"""The kind of device that tensors without data (on "meta") stand for, in a dry run."""


def kind_of(device: torch.device) -> str:
    """The device's type: "cpu", "cuda", …"""
    return STANDS_FOR.get() if device.type == "meta" else device.type
