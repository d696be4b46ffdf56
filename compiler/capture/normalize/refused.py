"""Operators whose meaning a captured graph cannot keep."""

from __future__ import annotations

from typing import Any

from compiler.capture.failures import Unsupported
from compiler.capture.normalize.builder import Builder, Call, handler


@handler("as_strided_scatter.default")
def as_strided_scatter(b: Builder, call: Call) -> Any:
    """torch's derivative of it is wrong."""
    raise Unsupported(
        "a tensor is changed in place through strides of its own",
        b.origin,
        help="change it through ordinary views (slices, select), or choose with `torch.where` and a mask",
    )


@handler("instance_norm.default")
def instance_norm(b: Builder, call: Call) -> Any:
    """Its signature does not say that it writes the running statistics, so tracing loses the new ones."""
    if call["use_input_stats"] and call["running_mean"] is not None:
        raise Unsupported(
            "instance normalization in training updates running statistics, which tracing does not see",
            b.origin,
            help="build it with track_running_stats = False: in training it normalizes with each sample's own statistics",
        )
    return b.keep(call)
