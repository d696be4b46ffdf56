"""Conversions between dtypes, and arithmetic that is spelled in two ways."""

from __future__ import annotations

from compiler.capture.normalize.builder import Builder, Call, handler
from compiler.ir.graph import Value


@handler(
    "_to_copy.default", "to.dtype", "to.dtype_layout", "to.device", "to.other", "to.prim_dtype", "type_as.default",
    "_cast_Float.default", "_cast_Double.default", "_cast_Half.default", "_cast_Long.default", "_cast_Int.default",
    "_cast_Short.default", "_cast_Byte.default", "_cast_Char.default",
    "_autocast_to_reduced_precision.default", "_autocast_to_full_precision.default",
)  # fmt: skip
def to(b: Builder, call: Call) -> Value:
    return b.cast(call.x, call.out.dtype)


@handler("copy.default")
def copy(b: Builder, call: Call) -> Value:
    """`copy(a, b)` is b with a's shape and dtype."""
    return b.expand(b.cast(call.args[1], call.out.dtype), call.out.shape)


@handler("rsub.Tensor")
def rsub(b: Builder, call: Call) -> Value:
    alpha = {} if call["alpha"] == 1 else {"alpha": call["alpha"]}
    return b.emit("aten.sub.Tensor", (call["other"], call.x), call.out.dtype, call.out.shape, **alpha)
