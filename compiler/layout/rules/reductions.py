"""Reductions, and what else works along whole dimensions: scans, sorts, searches for the largest."""

from __future__ import annotations

from typing import Any

from compiler.ir.graph import Node
from compiler.layout.rule import Rule, einsum, rule
from compiler.layout.rules.signature import arguments, positions
from compiler.layout.rules.views import FIRST, along

REDUCED_OVER_RANKS = {
    "aten.sum.default": "sum",
    "aten.sum.dim_IntList": "sum",
    "aten.count_nonzero.default": "sum",
    "aten.count_nonzero.dim_IntList": "sum",
    "aten.amax.default": "max",
    "aten.max.default": "max",
    "aten.any.default": "max",
    "aten.any.dim": "max",
    "aten.any.dims": "max",
    "aten.amin.default": "min",
    "aten.min.default": "min",
    "aten.all.default": "min",
    "aten.all.dim": "min",
    "aten.all.dims": "min",
}
"""Reductions of parts that are themselves reduced over the ranks."""

WHOLE = """
    mean.default mean.dim var.default var.dim var.correction std.default std.dim std.correction var_mean.default
    var_mean.dim var_mean.correction std_mean.correction prod.default prod.dim_int
    linalg_vector_norm.default norm.Scalar norm.ScalarOpt_dim max.dim min.dim aminmax.default argmax.default
    argmin.default median.default median.dim nanmedian.default mode.default kthvalue.default
""".split()
"""Reductions whose parts do not add up: the reduced dimensions must be whole."""


def reduction(node: Node, **options: Any) -> Rule:
    """The reduced dimensions are missing in the results, or are of size 1 there."""
    given, rank = arguments(node), len(node.inputs[0].shape)
    reduced = positions(given.get("dim"), rank)
    kept = [f"d{k}" if k not in reduced else "1" if given.get("keepdim") else "" for k in range(rank)]
    names = " ".join(f"d{k}" for k in range(rank))
    return einsum(node, f"{names} -> " + ", ".join([" ".join(kept)] * len(node.outputs)), **options)


@rule(*REDUCED_OVER_RANKS)
def partial(node: Node) -> Rule:
    over = REDUCED_OVER_RANKS[node.op]
    linear = FIRST if node.op.startswith("aten.sum") else ()
    return reduction(node, reduces={f"d{k}": over for k in range(len(node.inputs[0].shape))}, linear=linear)


@rule(*(f"aten.{name}" for name in WHOLE))
def whole_dimensions(node: Node) -> Rule:
    reduced = positions(arguments(node).get("dim"), len(node.inputs[0].shape))
    linear = FIRST if node.op.startswith("aten.mean") else ()
    return reduction(node, fixed=frozenset(f"d{k}" for k in reduced), linear=linear)


@rule("aten.logsumexp.default")
def logsumexp(node: Node) -> Rule:
    """Over one dimension, the operator exchanges maxima and sums where that is cut."""
    over = frozenset(f"d{k}" for k in positions(arguments(node)["dim"], len(node.inputs[0].shape)))
    return reduction(node, **{"collective" if len(over) == 1 else "fixed": over})


@rule(
    "aten.cumprod.default",
    "aten.cummax.default",
    "aten.cummin.default",
    "aten.logcumsumexp.default",
    "aten.sort.default",
    "aten.sort.stable",
    "aten.argsort.default",
    "aten.argsort.stable",
    "aten.topk.default",
    "aten.glu.default",
)
def ordered(node: Node) -> Rule:
    """One line of elements along `dim` at a time."""
    return along(node, arguments(node)["dim"])


@rule("aten.cumsum.default")
def cumsum(node: Node) -> Rule:
    return along(node, node.args[1], linear=FIRST)


@rule("aten.diff.default")
def diff(node: Node) -> Rule:
    alone = len(node.inputs) == 1
    return along(node, arguments(node)["dim"], linear=FIRST if alone else ())


@rule("planc.count")
def count(node: Node) -> Rule:
    """How many elements there are depends on the operand's type alone, and is the same everywhere."""
    names = " ".join(f"d{k}" for k in range(len(node.inputs[0].shape)))
    return einsum(node, f"{names} ->", shape_only=frozenset({0}))
