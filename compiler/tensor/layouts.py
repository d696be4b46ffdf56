"""Dimensions of parameters as layouts: what of each a rank holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from compiler.ir.graph import Graph, Value
from compiler.layout.joined import in_pieces
from compiler.layout.placement import Layout, Mesh, Placement, R, Shard, V, normal
from compiler.tensor.divide import Division
from compiler.tensor.indices import Index, by_parts, follow, leaves


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
    parts = {(value, dim): by_parts(leaves(known[value][dim])) for value, dim in pairs}
    runs = {pair: [[index for index in part if index.is_free] for part in parts[pair]] for pair in pairs}
    division = Division(mesh, axes)
    for run in sorted((run for each in runs.values() for run in each), key=len, reverse=True):
        division.divide(run)
    mesh = mesh.split(division.sub_axes())
    axes = mesh.parts(*axes)
    layouts = {}
    for pair in pairs:
        found = None
        if any(runs[pair]) or all(index.is_beside for part in parts[pair] for index in part):
            found = index_layout(*pair, parts[pair], division, mesh, axes)
        # Where every operator that reads it needs all of it: cut as asked, and gathered behind the layer.
        layouts[pair] = found or Layout((axis, Shard(pair[1])) for axis in axes)
    return Divided(mesh, axes, layouts)


def index_layout(
    value: Value, dim: int, parts: Sequence[Sequence[Index]], division: Division, mesh: Mesh, axes: Sequence[str]
) -> Layout | None:
    """Each index cut over its axes. Over those that cut none of a parameter's, it is used in work that differs. Parts
    that are not alike are cut each along its outermost index; None if they cannot be."""
    places: dict[str, Placement] = {axis: V if value.differentiable else R for axis in axes}
    alike = [[(index.size, division.cut_by(index, mesh)) for index in part] for part in parts]
    if any(each != alike[0] for each in alike):
        return Layout(places | cut) if (cut := piecewise(dim, parts, division, mesh)) else None
    outer = len(parts)
    for index in parts[0]:
        unit = value.shape[dim] // (outer * index.size)
        over = division.cut_by(index, mesh)
        ways = math.prod(mesh.size(axis) for axis in over)
        places |= dict.fromkeys(over, normal(Shard(dim, outer, unit), value.shape[dim], ways))
        outer *= index.size
    return Layout(places)


def piecewise(
    dim: int, parts: Sequence[Sequence[Index]], division: Division, mesh: Mesh
) -> Mapping[str, Placement]:
    """A cut of each part, over the axes that cut the outermost index of all that can be divided. One that cannot (what
    all heads share) is cut to be stored, and gathered behind the layer. Each must divide evenly."""
    over = [division.cut_by(part[0], mesh) for part in parts if any(index.is_free for index in part)]
    shared = tuple(axis for axis in over[0] if all(axis in each for each in over)) if over else ()
    ways = math.prod(mesh.size(axis) for axis in shared)
    lengths = [math.prod(index.size for index in part) for part in parts]
    units = [part[0].size if division.cut_by(part[0], mesh) else length for part, length in zip(parts, lengths)]
    even = all(unit % ways == 0 for unit in units)
    return dict.fromkeys(shared, in_pieces(Shard(dim), lengths)) if even else {}
