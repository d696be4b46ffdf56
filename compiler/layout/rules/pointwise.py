"""Pointwise operators: every dimension of the result is a factor, and operands broadcast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from compiler.ir.graph import Node, Value
from compiler.layout.rule import Rule, einsum, rule
from compiler.layout.rules.signature import arguments, by_name, floating, linear_in

POINTWISE = """
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu conj cos cosh deg2rad digamma elu erf erfc erfinv
    exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf isposinf
    isreal leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit mish mvlgamma nan_to_num polygamma
    rad2deg reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink
    special_bessel_j0 special_entr special_erfcx special_expit special_i0e special_i1 special_i1e special_log_ndtr
    special_ndtr special_ndtri sqrt square tan tanh threshold trunc

    __and__ __lshift__ __or__ __rshift__ __xor__ atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift
    bitwise_xor copysign eq float_power floor_divide fmax fmin fmod gcd ge gt heaviside hypot lcm ldexp le logaddexp
    logaddexp2 logical_and logical_or logical_xor lt maximum minimum ne nextafter not_equal pow remainder
    special_xlog1py special_zeta xlogy

    addcdiv clamp clamp_max clamp_min clip lerp
""".split()

LINEAR = {
    "add": ("self other",),
    "addcmul": ("self tensor1", "self tensor2"),
    "alias": ("self",),
    "clone": ("self",),
    "contiguous": ("self",),
    "detach": ("self",),
    "div": ("self",),
    "mul": ("self", "other"),
    "multiply": ("self", "other"),
    "neg": ("self",),
    "negative": ("self",),
    "rsub": ("self other",),
    "sub": ("self other",),
    "true_divide": ("self",),
    "where": ("self other",),
}
"""Those through which partial sums may pass, with the groups of arguments that may be partial together."""


def overloads(names: Iterable[str]) -> Iterator[str]:
    """Every overload of these ATen operators that makes one new tensor of tensors: "add" → "aten.add.Tensor", …"""
    for name in names:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            schema = getattr(packet, overload)._schema
            kinds = [str(item.type) for item in schema.arguments]
            makes_one = [str(item.type) for item in schema.returns] == ["Tensor"]
            if makes_one and any("Tensor" in kind for kind in kinds) and not schema.is_mutable:
                yield f"aten.{name}.{overload}"


def shared(node: Node, groups: Iterable[str] = (), **options: Any) -> Rule:
    """All operands broadcast to the result."""
    text = ", ".join(["..."] * len(node.inputs)) + " -> ..."
    return einsum(node, text, linear=linear_in(node, groups), **options)


@rule(*overloads(POINTWISE))
def pointwise(node: Node) -> Rule:
    return shared(node)


@rule(*overloads(LINEAR))
def linear(node: Node) -> Rule:
    rounds = arguments(node).get("rounding_mode") is not None
    return shared(node, () if rounds else LINEAR[node.op.split(".")[1]])


@rule("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(node: Node) -> Rule:
    """Filling with zero is linear; any other number would be added up."""
    zero = arguments(node)["value"] == 0
    return shared(node, ("self",) if zero else ())


@rule("aten.max.other", "aten.min.other")
def extremum(node: Node) -> Rule:
    return shared(node)


@rule("planc.cast")
def cast(node: Node) -> Rule:
    """From one number type to a floating one, partial sums may pass."""
    (out,) = node.outputs
    assert out is not None
    passes = node.inputs[0].dtype != "bool" and floating(out)
    return shared(node, ("input",) if passes else (), cheap=True)


@rule("planc.dropout")
def dropout(node: Node) -> Rule:
    """Ranks that hold terms of one value drop the same elements: their key holds only the axes that cut the value."""
    return by_name(node, {"input": "..."}, "...", linear=("input",))


@rule("aten.prelu.default")
def prelu(node: Node) -> Rule:
    """One slope for all, or one for each channel (dimension 1)."""
    value, weight = node.inputs
    per_channel = weight.shape and weight.shape[0] != 1 and len(value.shape) > 1
    return einsum(node, "b c ..., c -> b c ..." if per_channel else f"..., {'1' * len(weight.shape)} -> ...")


@rule("aten.isin.Tensor_Tensor", "aten.isin.Tensor_Scalar", "aten.bucketize.Tensor")
def membership(node: Node) -> Rule:
    """Each element is compared with all of a list, which must be whole."""
    listed = [name for name in ("test_elements", "boundaries") if isinstance(arguments(node).get(name), Value)]
    marks = {name: " ".join(f"k{i}" for i in range(len(arguments(node)[name].shape))) for name in listed}
    fixed = frozenset(" ".join(marks.values()).split())
    return by_name(node, {"elements": "...", "self": "..."} | marks, "...", fixed=fixed)
