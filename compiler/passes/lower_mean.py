"""lower_mean: means and variances become sums and counts, which layouts can follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compiler.ir.graph import Graph, Node, Value
from compiler.layout.rules.signature import arguments, positions
from compiler.passes.lower_support import Emitter, replace_calls

MEANS = ("aten.mean.default", "aten.mean.dim")
SPREADS = tuple(
    f"aten.{name}.{form}"
    for name in ("var", "std", "var_mean", "std_mean")
    for form in ("default", "dim", "correction")
)


@dataclass(frozen=True)
class LowerMean:
    """A mean is a sum divided by `planc.count`: the number of real elements, whatever the layout and the micro-batch.

    The parts of a sum over a sharded dimension are terms of the whole sum, so that a mean over a sharded batch is
    exact; a count that depends on nothing but shapes is a constant. Half precision is summed in float32.

    before:  %m : float32[4] = aten.mean.dim(%x, [0])                       # %x : float32[8, 4]
    after:   %m.sum : float32[4] = aten.sum.dim_IntList(%x, [0], False)
             %m.count : float32[] = planc.count(%x, [0])
             %m : float32[4] = aten.div.Tensor(%m.sum, %m.count)
    """

    name: str = "lower_mean"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"means_lowered"})

    def __call__(self, graph: Graph) -> Graph:
        return replace_calls(graph, _lower)


def _lower(node: Node, emit: Emitter) -> Sequence[Value | None] | None:
    if node.op in MEANS:
        return _mean(node, emit)
    if node.op in SPREADS:
        return _spread(node, emit)
    return None


def _mean(node: Node, emit: Emitter) -> list[Value]:
    given, value, out = arguments(node), node.inputs[0], node.outputs[0]
    assert out is not None
    dims = sorted(positions(given.get("dim"), len(value.shape)))
    wide = emit.wide(emit.cast(value, out.dtype))
    return [emit.cast(emit.mean(wide, dims, given.get("keepdim", False)), out.dtype)]


def _spread(node: Node, emit: Emitter) -> list[Value | None]:
    """var, std, and either with the mean: the squared distances from the mean over count − correction."""
    given, value = arguments(node), node.inputs[0]
    kind = node.op.split(".")[1]
    dims, keepdim = sorted(positions(given.get("dim"), len(value.shape))), given.get("keepdim", False)
    wide = emit.wide(value)
    mean = emit.mean(wide, dims, keepdim=True)
    away = emit("aten.sub.Tensor", wide, mean)
    squares = emit.sum(emit("aten.mul.Tensor", away, away), dims, keepdim)
    count = _degrees(emit, emit.count(wide, dims), _correction(given), math.prod(value.shape[dim] for dim in dims))
    result = emit("aten.div.Tensor", squares, count)
    if kind.startswith("std"):
        result = _root(emit, result)
    results: list[Value | None] = [emit.cast(result, value.dtype)]
    if kind.endswith("mean"):
        if not keepdim:
            kept = tuple(size for dim, size in enumerate(value.shape) if dim not in dims)
            mean = emit("aten.view.default", mean, kept)
        results.append(emit.cast(mean, value.dtype))
    return results


def _correction(given: dict[str, Any]) -> float:
    if "unbiased" in given:
        return 1 if given["unbiased"] else 0
    return 1 if given["correction"] is None else given["correction"]


def _degrees(emit: Emitter, count: Value, correction: float, total: int) -> Value:
    """The degrees of freedom, never negative (torch then divides by zero)."""
    if not correction:
        return count
    left = emit("aten.sub.Scalar", count, correction)
    return left if total > correction else emit("aten.clamp_min.default", left, 0)


def _root(emit: Emitter, variance: Value) -> Value:
    """A square root whose gradient is zero at zero, as torch.std has it."""
    flat = emit("aten.eq.Scalar", variance, 0)
    root = emit("aten.sqrt.default", emit("aten.masked_fill.Scalar", variance, flat, 1.0))
    return emit("aten.masked_fill.Scalar", root, flat, 0.0)
