"""Tensors made of nothing: constants in one form, counting in one form."""

from __future__ import annotations

from compiler.capture.normalize.builder import Builder, Call, handler
from compiler.ir.graph import Value


@handler("full.default", "full_like.default", "new_full.default")
def full(b: Builder, call: Call) -> Value:
    value = call["fill_value"]
    if isinstance(value, Value):
        return b.expand(b.cast(value, call.out.dtype), call.out.shape)
    return b.full(call.out.shape, value, call.out.dtype)


@handler("zeros.default", "zeros_like.default", "new_zeros.default", "zero.default")
def zeros(b: Builder, call: Call) -> Value:
    return b.full(call.out.shape, 0, call.out.dtype)


@handler("ones.default", "ones_like.default", "new_ones.default")
def ones(b: Builder, call: Call) -> Value:
    return b.full(call.out.shape, 1, call.out.dtype)


@handler(
    "empty.memory_format", "empty_like.default", "new_empty.default", "empty_strided.default", "empty_permuted.default",
    "new_empty_strided.default",
)  # fmt: skip
def empty(b: Builder, call: Call) -> Value:
    """What an empty tensor holds is undefined; zeros at least are the same on every rank."""
    return b.full(call.out.shape, 0, call.out.dtype)


@handler("scalar_tensor.default")
def scalar(b: Builder, call: Call) -> Value:
    return b.full((), call.args[0], call.out.dtype)


@handler("fill.Scalar", "fill.Tensor")
def fill(b: Builder, call: Call) -> Value:
    value = call["value"]
    if isinstance(value, Value):
        return b.expand(b.cast(value, call.out.dtype), call.out.shape)
    return b.full(call.out.shape, value, call.out.dtype)


@handler("arange.default", "arange.start", "arange.start_step")
def arange(b: Builder, call: Call) -> Value:
    start, step = call.named.get("start", 0), call.named.get("step", 1)
    dtype = call.out.dtype
    args = (start, call["end"], step)
    return b.emit("aten.arange.start_step", args, dtype, call.out.shape, dtype=f"torch.{dtype}")
