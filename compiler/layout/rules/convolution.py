"""Convolutions, pooling, resampling: samples and channels may be cut, space must be whole."""

from __future__ import annotations

import re
from typing import Any

from compiler.ir.graph import Node
from compiler.layout.rule import LocalShapes, Rule, einsum, rule
from compiler.layout.rules.signature import arguments, by_name, with_arguments
from compiler.layout.rules.views import FIRST

PLAIN = [f"aten.conv{n}d.{form}" for n in (1, 2, 3) for form in ("default", "padding")]
TRANSPOSED = ["aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"]


def spatial(prefix: str, count: int) -> str:
    return " ".join(f"{prefix}{k}" for k in range(count))


@rule(*PLAIN, *TRANSPOSED, "aten.convolution.default")
def convolution(node: Node) -> Rule:
    """Channels are groups of inputs, which are contracted, and groups of outputs; groups are independent."""
    given = arguments(node)
    weight, groups = given["weight"], given["groups"]
    count = len(weight.shape) - 2
    batch = "b " if len(given["input"].shape) == len(weight.shape) else ""
    turned = given.get("transposed", node.op in TRANSPOSED)
    channels = "(g i) o" if turned else "(g o) i"
    operands = {
        "input": f"{batch}(g i) {spatial('x', count)}",
        "weight": f"{channels} {spatial('k', count)}",
        "bias": "(g o)",
    }
    fixed = frozenset(f"{prefix}{k}" for prefix in "xky" for k in range(count))
    return by_name(
        node,
        operands,
        f"{batch}(g o) {spatial('y', count)}",
        linear=("input bias", "weight bias"),
        addends=("bias",),
        sizes={"g": groups},
        fixed=fixed,
        localize=local_groups if groups > 1 else None,
    )


def local_groups(node: Node, shapes: LocalShapes) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """As many groups as the local channels make."""
    given = arguments(node)
    turned = given.get("transposed", node.op in TRANSPOSED)
    # Of a group the weight's second dimension counts the inputs, or, transposed, the outputs.
    counted = node.outputs[0] if turned else given["input"]
    channels, own = shapes(counted)[1 - len(given["weight"].shape)], shapes(given["weight"])[1]
    return with_arguments(node, groups=channels // own)


POOLS = """
    avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    replication_pad1d replication_pad2d replication_pad3d reflection_pad1d reflection_pad2d reflection_pad3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    pixel_shuffle pixel_unshuffle grid_sampler_2d
""".split()


def forms(names: list[str]) -> list[str]:
    """Upsampling can also be given a scale: its overload `vec`."""
    return [f"aten.{name}.{form}" for name in names for form in ("default", *(["vec"] if "upsample" in name else []))]


@rule(*forms([name for name in POOLS if not re.search("shuffle|grid", name)]))
def space_alone(node: Node) -> Rule:
    count = int(re.search(r"(\d)d", node.op)[1])
    text = f"... {spatial('x', count)} -> " + ", ".join([f"... {spatial('y', count)}"] * len(node.outputs))
    fixed = frozenset(f"{prefix}{k}" for prefix in "xy" for k in range(count))
    return einsum(node, text, linear=() if "max" in node.op else FIRST, fixed=fixed)


@rule("aten.pixel_shuffle.default", "aten.pixel_unshuffle.default")
def pixel_shuffle(node: Node) -> Rule:
    return einsum(node, "... c h w -> ... d i j", linear=FIRST, fixed=frozenset("chwdij"))


@rule("aten.grid_sampler_2d.default", "aten.grid_sampler.default")
def grid_sampler(node: Node) -> Rule:
    """Each sample's grid says where to read in all of its channels."""
    count = len(node.inputs[0].shape) - 2
    text = f"b c {spatial('x', count)}, b {spatial('y', count)} n -> b c {spatial('y', count)}"
    return einsum(node, text, linear=FIRST, fixed=frozenset({"n", *spatial("x", count).split()}))
