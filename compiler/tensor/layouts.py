"""Dimensions of parameters as layouts: what of each a rank holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from compiler.ir.graph import Graph, Value
from compiler.layout.joined import in_pieces
from compiler.layout.placement import Layout, Mesh, Placement, R, Shard, V, normal
from compiler.tensor.divide import Division
from compiler.tensor.indices import Index, by_parts, follow, leaves, length


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
    ways = math.prod(mesh.size(axis) for axis in axes)
    parts = {(value, dim): by_parts(leaves(known[value][dim]), ways) for value, dim in pairs}
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
    """Each index cut over its axes. Over those that cut none of a parameter's, it is used in work that differs. None if
    there are parts that are not alike, and no cut of all of them is what their indices ask for."""
    cuts = [[(index.size, division.cut_by(index, mesh)) for index in part] for part in parts]
    if any(each != cuts[0] for each in cuts):
        return piecewise(dim, parts, division, mesh, axes)
    places: dict[str, Placement] = {axis: V if value.differentiable else R for axis in axes}
    outer = len(parts)
    for index in parts[0]:
        unit = value.shape[dim] // (outer * index.size)
        over = division.cut_by(index, mesh)
        ways = math.prod(mesh.size(axis) for axis in over)
        places |= dict.fromkeys(over, normal(Shard(dim, outer, unit), value.shape[dim], ways))
        outer *= index.size
    return Layout(places)


def piecewise(
    dim: int, parts: Sequence[Sequence[Index]], division: Division, mesh: Mesh, axes: Sequence[str]
) -> Layout | None:
    """Each part cut over all of the axes, evenly. Where they cut its indices, that is the same; an axis that cuts none
    (as sub-axes over which key/value heads are not divided, or all where all heads share a part) stores a part of it,
    and the part alone is gathered behind the layer."""
    ways = math.prod(mesh.size(axis) for axis in axes)
    lengths = [length(part) for part in parts]
    if any(each % ways for each in lengths) or not all(nested(part, division, mesh, axes) for part in parts):
        return None
    return Layout(dict.fromkeys(axes, in_pieces(Shard(dim), lengths)))


def nested(part: Sequence[Index], division: Division, mesh: Mesh, axes: Sequence[str]) -> bool:
    """Whether to cut each index over its axes is to cut the part over all of these axes, but for those that cut none of
    its indices: outer axes have cut an index into its single values where the next one is cut."""
    left, single = tuple(axes), True
    for index in part:
        over = division.cut_by(index, mesh)
        ways = math.prod(mesh.size(axis) for axis in over)
        if over and not (single and left[: len(over)] == over and index.size % ways == 0):
            return False
        left, single = left[len(over) :], single and index.size == ways
    return True
