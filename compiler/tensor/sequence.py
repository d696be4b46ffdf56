"""Sequence parallelism: activations between the split layers are cut along the sequence (Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198).

Only the activation that enters the first of the repeated layers is placed; everything after it follows from the costs:
a column layer gathers the sequence, a row layer's partial sums are scattered along it, and norms work on the part.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.context.layouts import context_order, entering
from compiler.dsl.plan import Plan
from compiler.ir.graph import Graph, Value
from compiler.layout.placement import Layout, Mesh, Shard


def sequence_layouts(plan: Plan, graph: Graph, units: Sequence[str], mesh: Mesh) -> dict[Value, Layout]:
    """What of its layout over the tensor axis each placed activation is given."""
    strategy = plan.tensor
    axes = mesh.parts(*strategy.axes) if strategy is not None and strategy.sequence else ()
    if not axes:
        return {}
    batch_dim = next((spec.batch_dim for spec in plan.inputs if spec.batch_dim is not None), 0)
    place = Shard(1 - batch_dim if batch_dim in (0, 1) else 1, order=context_order(plan))
    return {
        value: Layout((axis, place) for axis in axes)
        for value in entering(graph, units)
        if len(value.shape) == 3
    }
