"""Dimensions of parameters as layouts: what of each a rank holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from compiler.ir.graph import Graph, Value
from compiler.layout.placement import Layout, Mesh, Placement, R, Shard, V, normal
from compiler.tensor.divide import Division
from compiler.tensor.indices import Index, follow, leaves


@dataclass(frozen=True)
class Divided:
    """The mesh, with axes split into sub-axes where that divides better, and a layout over the tensor axes for each
    parameter and dimension of it."""

    mesh: Mesh
    axes: tuple[str, ...]
    layouts: Mapping[tuple[Value, int], Layout]


def divided(graph: Graph, mesh: Mesh, axes: Sequence[str], dims: Mapping[Value, Collection[int]]) -> Divided:
    """Divide these dimensions over the axes, each by the indices that it is made of."""
    known = follow(graph, dims)
    pairs = [(value, dim) for value, those in dims.items() for dim in those]
    runs = {pair: [index for index in leaves(known[pair[0]][pair[1]]) if not index.whole] for pair in pairs}
    division = Division(mesh, axes)
    for run in sorted(runs.values(), key=len, reverse=True):
        division.divide(run)
    mesh = mesh.split(division.sub_axes())
    parts = mesh.parts(*axes)
    layouts = {}
    for value, dim in pairs:
        indices = leaves(known[value][dim])
        if runs[value, dim] or all(index.beside for index in indices):
            layouts[value, dim] = index_layout(value, dim, indices, division, mesh, parts)
        else:  # every operator that reads it needs all of it: cut as asked, and gathered behind the layer
            layouts[value, dim] = Layout((axis, Shard(dim)) for axis in parts)
    return Divided(mesh, parts, layouts)


def index_layout(
    value: Value, dim: int, indices: Sequence[Index], division: Division, mesh: Mesh, axes: Sequence[str]
) -> Layout:
    """Each index cut over its axes. Over those that cut none of a parameter's, it is used in work that differs."""
    places: dict[str, Placement] = {axis: V if value.differentiable else R for axis in axes}
    outer = 1
    for index in indices:
        unit = value.shape[dim] // (outer * index.size)
        over = division.cut_by(index, mesh)
        ways = math.prod(mesh.size(axis) for axis in over)
        places |= dict.fromkeys(over, normal(Shard(dim, outer, unit), value.shape[dim], ways))
        outer *= index.size
    return Layout(places)
