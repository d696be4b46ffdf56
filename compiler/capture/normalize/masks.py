"""Masks that depend on no input are constants: what they mean is found by computing them, not by how they are spelled.

    before:  %q : int64[64] = aten.arange.start_step(0, 64, 1)   …   %mask : bool[1, 1, 64, 64] = aten.le.Tensor(%k, %q)
             %a = planc.attention(%query, %key, %value, %mask, False, …)
    after:   %a = planc.attention(%query, %key, %value, None, True, …)

A mask that lets everything through is dropped; one that is exactly the causal triangle becomes `causal`. Transformers
libraries build their masks from `arange`s in many ways, and a kernel can use neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compiler.ir.graph import Graph, Node, Value
from compiler.ir.interpret import apply

LARGEST = 1 << 27
"""Elements of the largest intermediate that is computed."""


def recognize_masks(graph: Graph, constants: Mapping[str, Any]) -> None:
    """Replace constant masks of attention, in place."""
    known: dict[Value, str] = {}
    for node in graph.nodes:
        if node.op != "planc.attention" or not isinstance(node.args[3], Value):
            continue
        mask = node.args[3]
        if mask not in known:
            known[mask] = meaning(mask, constants)
        kind, causal = known[mask], node.args[4]
        square = node.args[0].shape[-2] == node.args[1].shape[-2]
        if kind == "all":
            node.args = (*node.args[:3], None, causal, *node.args[5:])
        elif kind == "causal" and square:
            node.args = (*node.args[:3], None, True, *node.args[5:])


def meaning(mask: Value, constants: Mapping[str, Any]) -> str:
    """ "all", "causal", or "" for any other mask or one that is not known now."""
    value = constant_value(mask, constants)
    if value is None or value.dim() < 2:
        return ""
    allowed = value if value.dtype == torch.bool else None
    if allowed is None:
        if bool((value == 0).all()):
            return "all"
        lowest = torch.finfo(value.dtype).min
        hidden = value <= lowest  # -inf, or the most negative number: no weight is left after the exponential
        if not bool(((value == 0) | hidden).all()):
            return ""
        allowed = ~hidden
    if bool(allowed.all()):
        return "all"
    rows, columns = allowed.shape[-2:]
    if rows != columns:
        return ""
    triangle = torch.ones(rows, columns, dtype=torch.bool).tril_()
    return "causal" if bool((allowed == triangle).all()) else ""


def constant_value(value: Value, constants: Mapping[str, Any]) -> Tensor | None:
    """What the value is, if that follows from constants alone and is not too large to compute."""
    order = ancestors(value)
    if order is None:
        return None
    env: dict[Value, Any] = {}
    for item in order:
        if isinstance(item, Value):
            tensor = constants.get(item.name) if item.kind == "constant" else None
            if tensor is None or isinstance(tensor, torch._subclasses.FakeTensor):
                return None
            env[item] = tensor
            continue
        results = apply(item, env)
        for out, result in zip(item.outputs, results):
            if out is not None:
                env[out] = collapsed(result)
                if env[out].numel() > LARGEST:
                    return None
    found: Tensor = env[value]
    return found


def ancestors(value: Value) -> list[Node | Value] | None:
    """Everything that the value is computed from, operands first; None if an input is among it."""
    order: dict[Node | Value, None] = {}
    stack: list[tuple[Value, bool]] = [(value, False)]
    while stack:
        item, ready = stack.pop()
        node = item.producer
        what: Node | Value = item if node is None else node
        if what in order:
            continue
        if node is None:
            if item.kind != "constant":
                return None
            order[item] = None
        elif ready:
            order[node] = None
        else:
            if not node.op.startswith("aten.") and node.op != "planc.cast":
                return None
            stack.append((item, True))
            stack.extend((operand, False) for operand in node.inputs)
    return list(order)


def collapsed(tensor: Tensor) -> Tensor:
    return tensor
