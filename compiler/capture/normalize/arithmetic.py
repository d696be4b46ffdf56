"""Conversions between dtypes, and arithmetic that is spelled in two ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiler.capture.normalize.builder import Builder, Call, handler
from compiler.ir.graph import Value

OTHER_NAMES = {
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor", "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift", "absolute": "abs", "clip": "clamp", "divide": "div", "greater": "gt",
    "greater_equal": "ge", "less": "lt", "less_equal": "le", "multiply": "mul", "negative": "neg", "not_equal": "ne",
    "subtract": "sub", "true_divide": "div",
}  # fmt: skip


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


@handler("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor")
def neutral(b: Builder, call: Call) -> Sequence[Value | None]:
    """`sum(losses)` begins with 0: adding that, or multiplying by 1, changes nothing."""
    other, op = call["other"], call.node.op.split(".")[1]
    nothing = isinstance(other, (int, float)) and other == (0 if op in ("add", "sub") else 1)
    if nothing and call.x.dtype == call.out.dtype and call.x.shape == call.out.shape:
        return [call.x]
    return b.keep(call)


def renamed(b: Builder, call: Call) -> Sequence[Value | None]:
    """The same operator under its usual name."""
    _, name, overload = call.node.op.split(".")
    types = [(out.dtype, out.shape) for out in call.node.outputs if out is not None]
    return b.emit_many(f"aten.{OTHER_NAMES[name]}.{overload}", call.args, call.kwargs, types)


def _register() -> None:
    for name, usual in OTHER_NAMES.items():
        packet, target = getattr(torch.ops.aten, name), getattr(torch.ops.aten, usual)
        handler(*(f"{name}.{overload}" for overload in packet.overloads() if overload in target.overloads()))(renamed)


_register()
