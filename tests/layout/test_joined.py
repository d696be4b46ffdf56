"""Joined indices: split, slice and cat of parts of different lengths, cut in pieces, without communication."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiler.layout.joined import in_pieces, pieces_of_part, pieces_of_whole
from compiler.layout.placement import Layout, Mesh, Shard, V, parse_placement
from compiler.layout.redistribute import COLLECTIVES
from tests.layout.differential import Program, check
from tests.layout.strategies import bounded

TP = Mesh((("tp", 2),))
NESTED = Mesh((("tp.0", 2), ("tp.1", 2)))


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def over(mesh: Mesh, shard: Shard) -> Layout:
    return Layout((axis, shard) for axis in mesh.names)


def quiet(program: Program, mesh: Mesh, layouts: dict) -> list[Layout]:
    """The layouts of all results, once it is certain that they are right and that nothing was communicated."""
    found = check(program, mesh, layouts)
    assert not any(node.op in COLLECTIVES for node in found.graph.nodes)
    return [found.values[value].layout for value in program.graph.outputs.values()]


@pytest.mark.parametrize("mesh", [TP, NESTED], ids=["one axis", "two axes"])
def test_split_has_a_part_of_each_piece(mesh: Mesh) -> None:
    program = Program()
    x = program.input(real(3, 32))
    program.call("aten.split_with_sizes.default", x, [16, 8, 8], 1)
    assert quiet(program, mesh, {x: over(mesh, Shard(1, order="2+1+1"))}) == [over(mesh, Shard(1))] * 3


def test_slices_may_have_several_pieces() -> None:
    """The first half is one piece; the second two of one length, and so is its own half."""
    program = Program()
    x = program.input(real(32, 3))
    (half,) = program.call("aten.slice.Tensor", x, 0, 16, 32)
    program.call("aten.slice.Tensor", half, 0, 0, 8)
    program.call("aten.slice.Tensor", x, 0, 0, 16)
    outer = program.graph.outputs
    program.graph.outputs = {value.name: value for node in program.graph.nodes for value in node.outputs}
    assert len(outer) == 1
    layouts = quiet(program, TP, {x: over(TP, Shard(0, order="2+1+1"))})
    assert layouts == [over(TP, Shard(0, outer=2)), over(TP, Shard(0)), over(TP, Shard(0))]


def test_cat_is_in_pieces() -> None:
    program = Program()
    a, b = program.input(real(3, 8)), program.input(real(3, 4))
    program.call("aten.cat.default", (a, b), 1)
    assert quiet(program, TP, {a: over(TP, Shard(1)), b: over(TP, Shard(1))}) == [over(TP, Shard(1, order="2+1"))]


def test_heads_of_a_fused_projection() -> None:
    """Cut between heads, be they taken apart before the split or after it."""
    program = Program()
    x, w, b = program.input(real(2, 3, 5)), program.input(real(16, 5)), program.input(real(16))
    (fused,) = program.call("aten.linear.default", x, w, b)
    (heads,) = program.call("aten.view.default", fused, (2, 3, 8, 2))
    program.call("aten.split_with_sizes.default", heads, [4, 2, 2], 2)
    shard = Shard(0, order="2+1+1")
    layouts = quiet(program, TP, {x: Layout({"tp": V}), w: over(TP, shard), b: over(TP, shard)})
    assert layouts == [over(TP, Shard(2))] * 3


def test_pieces_that_do_not_divide_are_gathered() -> None:
    """One key/value head on two ranks."""
    program = Program()
    x = program.input(real(3, 8, 4))
    program.call("aten.split_with_sizes.default", x, [6, 1, 1], 1)
    found = check(program, TP, {x: over(TP, Shard(1, order="6+2"))})
    assert [node.op for node in found.graph.nodes if node.op in COLLECTIVES] == ["planc.all_gather"]


LENGTHS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@given(parts=st.lists(LENGTHS, min_size=1, max_size=3), mesh=st.sampled_from((TP, NESTED)), data=st.data())
@bounded(60)
def test_any_parts_of_any_pieces(parts: list[list[int]], mesh: Mesh, data: st.DataObject) -> None:
    """Split where pieces end, and a slice alone; the parts together again are right, however they are cut."""
    pieces = [length for part in parts for length in part]
    if len(pieces) == 1:
        return
    lengths = [2 ** len(mesh.axes) * sum(part) for part in parts]
    program = Program()
    x = program.input(real(sum(lengths), 2))
    split = program.call("aten.split_with_sizes.default", x, lengths)
    k = data.draw(st.integers(0, len(parts) - 1))
    sliced = program.call("aten.slice.Tensor", x, 0, sum(lengths[:k]), sum(lengths[: k + 1]))
    program.graph.outputs = {value.name: value for value in (*split, *sliced)}
    layouts = {x: over(mesh, in_pieces(Shard(0), pieces))}
    quiet(program, mesh, layouts)
    program.call("aten.cat.default", tuple(split))
    check(program, mesh, layouts)


def test_pieces_have_one_spelling() -> None:
    assert in_pieces(Shard(0), (4, 2, 2)) == Shard(0, order="2+1+1")
    assert in_pieces(Shard(0), (5, 5)) == Shard(0, outer=2)
    assert in_pieces(Shard(0, outer=3), (2, 1, 2, 1)) == Shard(0, outer=6, order="2+1")
    assert parse_placement(str(Shard(2, outer=3, unit=8, order="12+1"))) == Shard(2, outer=3, unit=8, order="12+1")


def test_pieces_of_parts_and_of_wholes() -> None:
    assert pieces_of_part((2, 1, 1), (16, 16), 1) == (1, 1)
    assert pieces_of_part((2, 1, 1), (24, 8), 0) == (2, 1)
    assert pieces_of_part((2, 1, 1), (20, 12), 0) is None
    assert pieces_of_whole([(2, 1), (1,)], (12, 6)) == (4, 2, 3)
