"""Operators that make a tensor of numbers. They cost next to nothing, so each rank makes just the part it needs."""

from __future__ import annotations

from typing import Any

from compiler.ir.graph import Node
from compiler.layout.rule import LocalShapes, Rule, einsum, parse_dims, rule
from compiler.layout.rules.signature import arguments

FILLS = {"zeros": 0, "ones": 1, "empty": 0, "full": None}
"""The number that each fills with; None: an argument says."""


def free(node: Node, **options: Any) -> Rule:
    """Every dimension of the result may be cut; operands, if any, only lend their type."""
    (out,) = node.outputs
    assert out is not None
    dims = parse_dims("...", out.shape)
    names = tuple(name for (name,) in dims)
    operands = tuple(tuple(() for _ in value.shape) for value in node.inputs)
    typed = frozenset(range(len(operands)))
    return Rule(operands, (dims,), dict(zip(names, out.shape)), shape_only=typed, cheap=True, **options)


@rule("aten.full.default", "aten.zeros.default", "aten.ones.default", "aten.empty.memory_format")
def fill(node: Node) -> Rule:
    return free(node, size_arg=0)


def localized_fill(node: Node, shapes: LocalShapes) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """`full_like(x, 1.0)` of x's whole shape → `full([local shape], 1.0)`, for x's own part may be another one."""
    (out,) = node.outputs
    assert out is not None
    name = node.op.split(".")[1].removeprefix("new_").removesuffix("_like")
    given = arguments(node)
    value = FILLS[name] if name != "full" else given["fill_value"]
    return "aten.full.default", (shapes(out), value), {"dtype": f"torch.{out.dtype}"}


@rule(*(f"aten.{name}_like.default" for name in FILLS), *(f"aten.new_{name}.default" for name in FILLS))
def fill_like(node: Node) -> Rule:
    return free(node, localize=localized_fill)


@rule(
    "aten.arange.default",
    "aten.arange.start",
    "aten.arange.start_step",
    "aten.eye.default",
    "aten.eye.m",
    "aten.linspace.default",
    "aten.logspace.default",
    "aten.scalar_tensor.default",
    "aten.tril_indices.default",
    "aten.triu_indices.default",
)
def counting(node: Node) -> Rule:
    """What an element is depends on where it stands: made whole, on every rank."""
    (out,) = node.outputs
    assert out is not None
    names = [f"n{k}" for k in range(len(out.shape))]
    return einsum(node, "-> " + " ".join(names), fixed=frozenset(names), cheap=True)
