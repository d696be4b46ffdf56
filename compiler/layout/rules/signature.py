"""Writing a rule by argument names, as an operator's own signature has them.

    by_name(node, {"input": "... k", "weight": "n k", "bias": "n"}, "... n", linear=("input bias", "weight bias"))

reads the call against the operator's signature: an argument that the call leaves out takes no part, and one that is a
list of tensors takes part once for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch

from compiler.ir.graph import Node, Value, values_in
from compiler.layout.rule import Rule, einsum

PLANC = {
    "planc.attention": "query key value mask causal scale dropout_p site window documents",
    "planc.batch_norm": "input weight bias running_mean running_var training momentum eps",
    "planc.cast": "input dtype",
    "planc.count": "input dims",
    "planc.cross_entropy": "logits target weight ignore_index label_smoothing",
    "planc.dropout": "input p site",
}
"""The signatures of planc's own operators; those of ATen are asked of torch."""


@cache
def _signature(op: str) -> tuple[tuple[str, Any], ...]:
    if op in PLANC:
        return tuple((name, None) for name in PLANC[op].split())
    namespace, packet, overload = op.split(".")
    schema = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema
    return tuple((item.name, item.default_value if item.has_default_value() else None) for item in schema.arguments)


def arguments(node: Node) -> dict[str, Any]:
    """The call's arguments by name, defaults filled in."""
    signature = _signature(node.op)
    given = dict(zip((name for name, _ in signature), node.args)) | node.kwargs
    return {name: given.get(name, default) for name, default in signature}


def with_arguments(node: Node, **changed: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The call `(op, args, kwargs)` with some arguments replaced: what a rule's `localize` answers."""
    names = [name for name, _ in _signature(node.op)]
    args = tuple(changed.pop(name, item) for name, item in zip(names, node.args))
    return node.op, args, {**node.kwargs, **changed}


def operand_names(node: Node) -> list[str]:
    """For each of `node.inputs`, the argument that it is (part of)."""
    signature = [name for name, _ in _signature(node.op)]
    names = [name for name, item in zip(signature, node.args) for _ in values_in(item)]
    return names + [name for name, item in node.kwargs.items() for _ in values_in(item)]


def linear_in(node: Node, groups: Iterable[str]) -> tuple[frozenset[int], ...]:
    """The groups of operands, each written as argument names, in which this very call is linear.

    An argument that is absent drops out of its group. One that is a number is a term that stays: were the others
    partial, every rank would add it, so that the group does not hold.
    """
    given, names = arguments(node), operand_names(node)
    found = []
    for group in groups:
        wanted = group.split()
        numbers = [name for name in wanted if given[name] is not None and not any(values_in(given[name]))]
        operands = frozenset(k for k, name in enumerate(names) if name in wanted)
        if operands and not numbers:
            found.append(operands)
    return tuple(found)


def by_name(
    node: Node,
    operands: Mapping[str, str],
    result: str,
    linear: Iterable[str] = (),
    addends: Iterable[str] = (),
    sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> Rule:
    """The rule whose operands are given by argument name (see the module's docstring)."""
    names = operand_names(node)
    left = ", ".join(operands[name] for name in names)
    added = frozenset(k for k, name in enumerate(names) if name in addends)
    return einsum(node, f"{left} -> {result}", sizes, linear=linear_in(node, linear), addends=added, **options)


def positions(dims: int | Iterable[int] | None, rank: int) -> set[int]:
    """Dimensions counted from the left; None or none at all means every one."""
    if isinstance(dims, int):
        dims = (dims,)
    return {dim % rank if rank else 0 for dim in dims or range(rank)}


def floating(value: Value) -> bool:
    return getattr(torch, value.dtype).is_floating_point
