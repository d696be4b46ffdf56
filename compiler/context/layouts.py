"""Where the sequence is: the cuts of inputs and activations that `context over cp` asks for.

Inputs with a sequence are cut along it, and what is computed from them follows. A model whose inputs have none (an
image) makes its sequence itself: the activation that enters the first of its repeated layers is cut. No choice here can
make a result wrong; what is not cut is computed whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from compiler.dsl.plan import InputSpec, Plan
from compiler.ir.graph import Graph, Value
from compiler.layout.placement import Layout, Shard
from compiler.segments.split import unit_of


def context_axes(plan: Plan) -> tuple[str, ...]:
    """The axes of more than one rank that share a sequence, outermost first."""
    axes = plan.context.axes if plan.context is not None else ()
    return tuple(axis.name for axis in plan.mesh if axis.name in axes and axis.size > 1)


def context_order(plan: Plan) -> str:
    """The order of cuts along the sequence: "" or "zigzag"."""
    return "zigzag" if context_axes(plan) and plan.context.order == "zigzag" else ""  # type: ignore[union-attr]


def context_methods(plan: Plan) -> dict[str, str]:
    """What attention does about each axis: `usp` is a ring over the first, and all-to-all over the last."""
    axes = context_axes(plan)
    if not axes:
        return {}
    assert plan.context is not None
    kind = plan.context.attention
    if kind != "usp":
        return dict.fromkeys(axes, kind)
    inner = plan.context.axes[-1]
    return {axis: "ulysses" if axis == inner else "ring" for axis in axes}


def ulysses_ways(plan: Plan) -> int:
    """How many ranks share the heads by all-to-all."""
    methods = context_methods(plan)
    return math.prod(plan.axis_size(axis) for axis, method in methods.items() if method == "ulysses")


def tensor_ways(plan: Plan) -> int:
    """How many ranks share the heads already."""
    return math.prod(plan.axis_size(axis) for axis in (plan.tensor.axes if plan.tensor is not None else ()))


def sequence_dim(plan: Plan, spec: InputSpec) -> int | None:
    """The dimension of an input that is its sequence: one of a name that `context { along "…" }` lists, or without such a
    list the one behind the batch of token-like inputs, `int64[batch, seq]`, and of features, `float32[batch, seq, width]`."""
    if plan.context is None or spec.batch_dim is None:
        return None
    along = plan.context.along
    if along:
        dims = [k for k, name in enumerate(spec.dim_names) if name and any(p.matches(name) for p in along)]
        return next((dim for dim in dims if dim != spec.batch_dim), None)
    rank, floating = len(spec.shape), spec.dtype.startswith(("float", "bfloat"))
    if rank < 2 or spec.batch_dim > 1 or (floating and rank != 3):
        return None
    return 1 - spec.batch_dim


def input_layouts(plan: Plan) -> dict[str, Layout]:
    """The cuts of inputs along their sequences, by name."""
    axes, order = context_axes(plan), context_order(plan)
    found = {}
    for spec in plan.inputs if axes else ():
        dim = sequence_dim(plan, spec)
        if dim is not None and spec.shape[dim] > 1:
            found[spec.name] = Layout((axis, Shard(dim, order=order)) for axis in axes)
    return found


def entering_layouts(
    plan: Plan, graph: Graph, units: Sequence[str], inputs: Mapping[str, Layout]
) -> dict[Value, Layout]:
    """Where no input has a sequence: the cut of what enters the first of the repeated layers."""
    axes, order = context_axes(plan), context_order(plan)
    if not axes or inputs:
        return {}
    return {
        value: Layout((axis, Shard(1, order=order)) for axis in axes)
        for value in entering(graph, units)
        if len(value.shape) == 3
    }


def entering(graph: Graph, units: Sequence[str]) -> list[Value]:
    """Activations that are made outside of the repeated layers and read inside."""
    known = set(units)
    home = {out: unit_of(node.origin.module, known) for node in graph.nodes for out in node.outputs if out is not None}
    found = dict.fromkeys(
        value
        for node in graph.nodes
        if unit_of(node.origin.module, known)
        for value in node.inputs
        if home.get(value) == "" and value.differentiable
    )
    return list(found)
