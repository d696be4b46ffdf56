"""Running a graph in eager PyTorch, one operator after another: the reference for what a graph means.

    results = interpret(graph, {"tokens": tokens, "embed.weight": weight, …})
    results["loss"]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compiler.ir.graph import Graph, Node, Value, map_values

Dropout = Callable[[tuple[int, ...], float, int], Tensor]
"""(shape, p, site) → which elements are kept, as booleans."""
Opaque = Callable[[Node, tuple[Any, ...]], Any]
"""(node, its arguments as tensors) → the results."""


def interpret(
    graph: Graph, inputs: Mapping[Any, Tensor], dropout: Dropout | None = None, opaque: Opaque | None = None
) -> dict[str, Tensor]:
    """The graph's outputs by role. `inputs` are by name or by value; gradients flow to those that require one."""
    env: dict[Value, Any] = {}
    for value in graph.inputs:
        env[value] = inputs[value] if value in inputs else inputs[value.name]
    for node in graph.nodes:
        results = apply(node, env, dropout, opaque)
        env.update((out, result) for out, result in zip(node.outputs, results) if out is not None)
    return {role: env[value] for role, value in graph.outputs.items()}


def apply(
    node: Node, env: Mapping[Value, Any], dropout: Dropout | None = None, opaque: Opaque | None = None
) -> tuple[Any, ...]:
    """The results of one node, given its operands."""
    args, kwargs = map_values((node.args, node.kwargs), env.__getitem__)
    if node.op == "planc.opaque":
        assert opaque is not None, "the graph has opaque modules: say how to run them"
        results = opaque(node, args)
    elif node.op.startswith("planc."):
        results = PLANC[node.op](args, dropout)
    else:
        results = operator(node.op)(*map(plain, args), **{key: plain(item) for key, item in kwargs.items()})
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


@cache
def operator(name: str) -> Any:
    """The torch operator called "aten.linear.default". A view of a strided tensor is a `reshape`."""
    namespace, packet, overload = ("aten.reshape.default" if name == "aten.view.default" else name).split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def plain(item: Any) -> Any:
    """An argument as torch takes it: "torch.float32" is a dtype."""
    if isinstance(item, str) and item.startswith("torch."):
        return getattr(torch, item.removeprefix("torch."))
    if isinstance(item, tuple):
        return [plain(x) for x in item]
    return item


# -- planc's own operators -------------------------------------------------------------------------------------------


def cast(args: tuple[Any, ...], dropout: Dropout | None) -> Tensor:
    return args[0].to(plain(args[1]))


def drop(args: tuple[Any, ...], dropout: Dropout | None) -> Tensor:
    x, p, site = args
    assert dropout is not None, "the graph has dropout: say which elements are kept"
    return x * dropout(tuple(x.shape), p, site) * (1.0 / (1.0 - p))


def attention(args: tuple[Any, ...], dropout: Dropout | None) -> Tensor:
    """The formula, with zeros for a query that may attend to nothing."""
    q, k, v, mask, causal, scale, p, site, window, documents = (*args, None, None)[:10]
    if q.dim() > 2 and k.shape[-3] != q.shape[-3]:
        groups = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    scores = q @ k.transpose(-2, -1) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if window is not None:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-window), float("-inf"))
    if documents is not None:
        other = documents[..., :, None] != documents[..., None, :]
        scores = scores.masked_fill(other.unsqueeze(-3), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = torch.ops.aten._safe_softmax(scores, -1)
    if p > 0:
        assert dropout is not None, "the graph has dropout: say which elements are kept"
        weights = weights * dropout(tuple(weights.shape), p, site) * (1.0 / (1.0 - p))
    return weights @ v


PLANC: dict[str, Callable[[tuple[Any, ...], Dropout | None], Any]] = {
    "planc.cast": cast,
    "planc.dropout": drop,
    "planc.attention": attention,
}
