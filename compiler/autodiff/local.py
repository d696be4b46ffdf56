"""From global to local: what a node does on one rank, given the layouts of its values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from compiler.ir.graph import Node, Value
from compiler.layout.placement import Layout, Mesh, Shard, local_shape, shard_axes
from compiler.layout.redistribute import held_cut
from compiler.layout.rule import rule_of
from runtime.cuts import Cut, parse_cuts

COMMUNICATES = {
    "planc.all_reduce": 1,
    "planc.all_gather": 1,
    "planc.reduce_scatter": 1,
    "planc.all_to_all": 1,
    "planc.cross_entropy": -1,
    "planc.cross_entropy_backward": -1,
    "planc.log_sum_exp": -1,
    "planc.attention_blocks": -1,
    "planc.attention_blocks_backward": -1,
}
"""Operators of local code that communicate, and which argument says over what: axes, an axis, or a cut."""


def communicated_axes(node: Node) -> tuple[str, ...]:
    """The axes over which a node of local code communicates, if any."""
    if node.op not in COMMUNICATES:
        return ()
    over = node.args[COMMUNICATES[node.op]]
    if isinstance(over, str):
        return tuple(axis for cut in parse_cuts(over) for axis in cut.axes) if ":" in over or not over else (over,)
    return tuple(over)


def shape_of(value: Value, mesh: Mesh) -> tuple[int, ...]:
    """The shape of a rank's part."""
    return local_shape(value.shape, value.layout or Layout(), mesh)


def localized(node: Node, mesh: Mesh) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Operator and arguments on one rank: sizes among the arguments become local sizes."""
    rule = rule_of(node)
    if rule.localize is not None:
        return rule.localize(node, lambda value: shape_of(value, mesh))
    args = list(node.args)
    if rule.size_arg is not None:
        out = node.outputs[0]
        assert out is not None
        args[rule.size_arg] = shape_of(out, mesh)
    return node.op, tuple(args), node.kwargs


def cut_text(axes: Iterable[str], dim: int, outer: int, count: int, unit: int, mesh: Mesh, order: str = "") -> str:
    """The cut as the runtime reads it; axes of size 1 do not cut."""
    return str(Cut(dim, tuple(axis for axis in axes if mesh.size(axis) > 1), outer, count, unit, order))


def held_cut_text(value: Value, axes: tuple[str, ...], mesh: Mesh) -> str:
    """How `axes`, which all cut one factor, cut the value, as the runtime reads it."""
    shard = (value.layout or Layout())[axes[0]]
    assert isinstance(shard, Shard)
    return cut_text(axes, *held_cut(value, shard, axes, mesh), mesh, shard.order)


def cuts_text(value: Value, mesh: Mesh, dim: int | None = None) -> str:
    """All cuts of a value, or those of one dimension, as the runtime reads them."""
    found: dict[Shard, str] = {}
    for place in (value.layout or Layout()).values():
        if isinstance(place, Shard) and place not in found and dim in (None, place.dim):
            axes = shard_axes(value.layout or Layout(), place, mesh)
            count = value.shape[place.dim] // (place.outer * place.unit)
            found[place] = cut_text(axes, place.dim, place.outer, count, place.unit, mesh, place.order)
    return ";".join(found.values())
