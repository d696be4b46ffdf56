"""Floating-point operations of one operator, from the shapes of its operands alone.

A multiplication and an addition count as two. Counted exactly are matrix products, convolutions and attention (causal
attention, which skips what it masks, as half); everything else is bound by memory and counts as 0. The rules read
`shape` only, so the operands may be the values of a graph or tensors without data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from runtime.blocks import visible_blocks
from runtime.cuts import Run

Rule = Callable[[Sequence[Any], Sequence[Any]], int]


def flops(op: str, args: Sequence[Any], results: Sequence[Any]) -> int:
    """Of `results = op(*args)`; `op` is a full name ("aten.mm.default", "planc.attention")."""
    namespace, name = op.split(".")[:2]
    rule = RULES.get(f"{namespace}.{name}")
    return rule(args, results) if rule is not None else 0


def product(a: Any, b: Any) -> int:
    """[…, m, k] times […, k, n]."""
    return 2 * math.prod(a.shape) * b.shape[-1]


def convolution(args: Sequence[Any], results: Sequence[Any]) -> int:
    """x, weight [out, in / groups, …], bias, stride, padding, dilation, transposed, …; a transposed convolution applies
    the weight to each of its inputs, not to each of its outputs."""
    applied = args[0] if args[6] else results[0]
    return 2 * math.prod(applied.shape) * math.prod(args[1].shape[1:])


def convolution_backward(args: Sequence[Any], results: Sequence[Any]) -> int:
    """d_y, x, weight, bias sizes, stride, padding, dilation, transposed, output padding, groups, (d_x, d_w, d_b) wanted."""
    applied = args[1] if args[7] else args[0]
    return 2 * math.prod(applied.shape) * math.prod(args[2].shape[1:]) * sum(map(bool, args[10][:2]))


def attention(args: Sequence[Any], results: Sequence[Any]) -> int:
    """query […, s, d], key […, t, d], value […, t, e], mask, causal, …: two products."""
    query, key, value, _, causal = args[:5]
    return _scores(query, key) * (query.shape[-1] + value.shape[-1]) // (2 if causal else 1)


def attention_backward(args: Sequence[Any], results: Sequence[Any]) -> int:
    """d_out, query, key, value, mask, out, log-sum-exp, causal, …: the scores again, and four products."""
    _, query, key, value = args[:4]
    return _scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1]) // (2 if args[7] else 1)


def attention_blocks(args: Sequence[Any], results: Sequence[Any]) -> int:
    """query, key, value, mask, documents, causal, window, scale, p, site, shape of the weights, …: of what a query sees
    in the mean over all of them."""
    return _seen(args) * 2 * (args[0].shape[-1] + args[2].shape[-1])


def attention_blocks_backward(args: Sequence[Any], results: Sequence[Any]) -> int:
    """d_out, query, key, value, mask, documents, out, log-sum-exp, learns, causal, window, …"""
    return _seen((*args[1:6], *args[9:])) * 2 * (3 * args[1].shape[-1] + 2 * args[3].shape[-1])


def _seen(args: Sequence[Any]) -> int:
    """Pairs of a query and a key that it sees, over the local queries of all batches and heads."""
    query, causal, window, (queries, keys) = args[0], args[5], args[6], args[10][-2:]
    whole = visible_blocks((Run(0, 0, queries),), (Run(0, 0, keys),), causal, window)
    return round(math.prod(query.shape[:-1]) * sum(block.area for block in whole) / max(queries, 1))


def kernel(causal: int) -> Rule:
    """An attention kernel: query, key, value, …; whether it is causal is argument `causal`, if it is there."""
    return lambda args, results: attention((*args[:3], None, any(args[causal : causal + 1])), results)


def kernel_backward(causal: int) -> Rule:
    """d_out, query, key, value, …; whether it is causal is argument `causal`, if it is there."""
    return lambda args, results: attention_backward(
        (*args[:4], None, None, None, any(args[causal : causal + 1])), results
    )


def gather_matmul(args: Sequence[Any], results: Sequence[Any]) -> int:
    """x, cut, ((factor, …), …), …: the whole, and its product with each factor [k, n]."""
    return sum(2 * math.prod(result.shape) * term[0].shape[0] for term, result in zip(args[2], results[1:]))


def _scores(query: Any, key: Any) -> int:
    """Twice the number of pairs of a query and a key, over all batches and query heads."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2]


RULES: dict[str, Rule] = {
    "aten.linear": lambda args, results: 2 * math.prod(args[0].shape) * args[1].shape[0],
    "aten.matmul": lambda args, results: 2 * math.prod(results[0].shape) * args[0].shape[-1],
    "aten.mm": lambda args, results: product(args[0], args[1]),
    "aten.bmm": lambda args, results: product(args[0], args[1]),
    "aten.addmm": lambda args, results: product(args[1], args[2]),
    "aten.baddbmm": lambda args, results: product(args[1], args[2]),
    "aten.convolution": convolution,
    "aten.convolution_backward": convolution_backward,
    "planc.product_into": lambda args, results: product(args[1], args[2]),
    "planc.gather_matmul": gather_matmul,
    "planc.matmul_scatter": lambda args, results: product(args[0], args[1]),
    "planc.matmul_reduce": lambda args, results: product(args[0], args[1]),
    "planc.attention": attention,
    "planc.attention_backward": attention_backward,
    "planc.attention_blocks": attention_blocks,
    "planc.attention_blocks_backward": attention_blocks_backward,
    "aten.addmm_": lambda args, results: product(args[1], args[2]),
    "aten._scaled_dot_product_flash_attention": kernel(4),
    "aten._scaled_dot_product_flash_attention_for_cpu": kernel(4),
    "aten._scaled_dot_product_flash_attention_backward": kernel_backward(11),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": kernel_backward(7),
}
"""By namespace and name, all overloads alike."""
