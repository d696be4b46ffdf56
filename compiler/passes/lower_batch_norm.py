"""lower_batch_norm: batch statistics become sums over the batch, so that they are synchronised by their layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compiler.dsl.plan import Pattern
from compiler.ir.graph import Graph, Node, Value
from compiler.layout.rules.signature import arguments
from compiler.passes.lower_support import Emitter, LoweringError, replace_calls

CALLS = {
    "aten.batch_norm.default": 1,
    "planc.batch_norm": 3,
    "aten._native_batch_norm_legit_functional.default": 5,
    "aten._native_batch_norm_legit.no_stats": 3,
}
"""Spellings of batch_norm, with their numbers of results; new running statistics, where answered, are the last two."""


@dataclass(frozen=True)
class LowerBatchNorm:
    """Normalise with the mean and the biased variance of the whole batch, written out in primitive operators.

    Their gradient, and their reduction over the ranks that share the batch, then follow as for any other sum. The
    running statistics take the unbiased variance and no part in differentiation. Half precision is normalised in
    float32. In evaluation the running statistics take the place of the batch's.

    `local` names modules (patterns) whose statistics each rank and micro-batch takes from its own part. Those stay
    one operator; their new running statistics are averaged over the parts.

    before:  %y, %mean, %var = planc.batch_norm(%x, %w, %b, %running_mean, %running_var, True, 0.1, 1e-05)
    after:   %y.sum : float32[1, 4] = aten.sum.dim_IntList(%x, [0], True)         # %x : float32[8, 4]
             %y.count : float32[] = planc.count(%x, [0])
             %y.div : float32[1, 4] = aten.div.Tensor(%y.sum, %y.count)
             %y.sub : float32[8, 4] = aten.sub.Tensor(%x, %y.div)
             …
    """

    local: tuple[str, ...] = ()
    name: str = "lower_batch_norm"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"batch_norm_lowered"})

    def __call__(self, graph: Graph) -> Graph:
        return replace_calls(graph, self.lower)

    def lower(self, node: Node, emit: Emitter) -> Sequence[Value | None] | None:
        if node.op not in CALLS:
            return None
        given = _given(node)
        if not given["training"] and given["running_mean"] is not None:
            y = _normalised(node, emit, given["running_mean"], given["running_var"])
            return _results(node, y, [given["running_mean"], given["running_var"]])
        if self.is_local(node.origin.module):
            return _local(node, emit)
        return _global(node, emit)

    def is_local(self, module: str) -> bool:
        """Whether a pattern names the module or one that it is in."""
        return any(Pattern(pattern).covers(module) for pattern in self.local)


def _given(node: Node) -> dict[str, Any]:
    """The arguments by name; one spelling has no running statistics."""
    return {"running_mean": None, "running_var": None, **arguments(node)}


def _global(node: Node, emit: Emitter) -> list[Value | None]:
    given = _given(node)
    x = emit.wide(given["input"])
    dims = tuple(dim for dim in range(len(x.shape)) if dim != 1)
    total = math.prod(x.shape[dim] for dim in dims)
    if total == 1:
        raise LoweringError(
            node,
            f"batch_norm in training has one value per channel only: its input is {list(x.shape)}",
            "use a larger batch, or put the module into evaluation mode",
        )
    count = emit.count(x, dims)
    mean = emit("aten.div.Tensor", emit.sum(x, dims, keepdim=True), count)
    away = emit("aten.sub.Tensor", x, mean)
    squares = emit.sum(emit("aten.mul.Tensor", away, away), dims, keepdim=True)
    variance = emit("aten.div.Tensor", squares, count)
    y = _scaled(node, emit, away, variance)
    news: list[Value] = []
    if given["running_mean"] is not None and len(node.outputs) > 1:
        ratio = emit("aten.div.Tensor", count, emit("aten.sub.Scalar", count, 1))
        unbiased = emit("aten.mul.Tensor", _constant(emit, variance), ratio)
        news = [
            _updated(emit, given["running_mean"], _constant(emit, mean), given["momentum"]),
            _updated(emit, given["running_var"], unbiased, given["momentum"]),
        ]
    return _results(node, y, news)


def _constant(emit: Emitter, value: Value) -> Value:
    return emit("aten.detach.default", value) if value.differentiable else value


def _updated(emit: Emitter, running: Value, new: Value, momentum: float) -> Value:
    """`(1 - momentum) * running + momentum * new`."""
    new = emit.cast(emit("aten.view.default", new, running.shape), running.dtype)
    kept = emit("aten.mul.Scalar", running, 1 - momentum)
    return emit("aten.add.Tensor", kept, emit("aten.mul.Scalar", new, momentum))


def _normalised(node: Node, emit: Emitter, mean: Value, variance: Value) -> Value:
    """With given statistics, one for each channel."""
    x = emit.wide(_given(node)["input"])
    along = _along_channels(x)
    away = emit("aten.sub.Tensor", x, emit("aten.view.default", emit.cast(mean, x.dtype), along))
    return _scaled(node, emit, away, emit("aten.view.default", emit.cast(variance, x.dtype), along))


def _scaled(node: Node, emit: Emitter, away: Value, variance: Value) -> Value:
    """Divided by the standard deviation, and made affine."""
    given = _given(node)
    inverse = emit("aten.rsqrt.default", emit("aten.add.Scalar", variance, given["eps"]))
    y = emit("aten.mul.Tensor", away, inverse)
    for name, op in (("weight", "aten.mul.Tensor"), ("bias", "aten.add.Tensor")):
        if given[name] is not None:
            y = emit(op, y, emit("aten.view.default", emit.cast(given[name], y.dtype), _along_channels(y)))
    return emit.cast(y, given["input"].dtype)


def _along_channels(value: Value) -> tuple[int, ...]:
    return tuple(size if dim == 1 else 1 for dim, size in enumerate(value.shape))


def _local(node: Node, emit: Emitter) -> list[Value | None]:
    """ATen's functional operator, whose rule leaves the batch free."""
    given, out = _given(node), node.outputs[0]
    assert out is not None
    running = [given["running_mean"], given["running_var"]] if given["running_mean"] is not None else []
    op = "_native_batch_norm_legit_functional.default" if running else "_native_batch_norm_legit.no_stats"
    args = (given["input"], given["weight"], given["bias"], *running, True, given["momentum"], given["eps"])
    made = Node(f"aten.{op}", args, {}, [], emit.origin)
    y = Value(f"{emit.base}.out", out.dtype, out.shape, differentiable=out.differentiable, producer=made)
    news = [Value(f"{emit.base}.new{k}", old.dtype, old.shape, producer=made) for k, old in enumerate(running)]
    made.outputs = [y, None, None, *news]
    emit.nodes.append(made)
    return _results(node, y, news)


def _results(node: Node, y: Value, news: Sequence[Value]) -> list[Value | None]:
    """As many results as the call has, the new running statistics last."""
    count = CALLS[node.op]
    return [y] if count == 1 else [y, *[None] * (count - 3), *(news or (None, None))]
