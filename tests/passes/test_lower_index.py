"""Indices that count are recognised, and what is made of them reads the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiler.layout.placement import Layout, Mesh, Shard
from compiler.passes.lower_index import LowerIndex, counts_along
from tests.layout.differential import Program, check
from tests.layout.operators import real, whole
from tests.layout.strategies import bounded, layouts, meshes
from tests.layout.text import collectives
from tests.passes.lowered import apply, ops, read


def counting(program: Program, size: int, *shape: int):
    """0, 1, … in this shape, all but one of whose dimensions are 1."""
    (rows,) = program.call("aten.arange.start_step", 0, size, 1)
    return program.call("aten.view.default", rows, shape)[0] if shape else rows


def last_of_each(program: Program):
    x, last = program.input(real(6, 5, 3)), program.input(whole(5, 6) - 5)
    return x, (counting(program, 6), last)


def one_for_each_sample_and_head(program: Program):
    x, at = program.input(real(6, 4, 5)), program.input(whole(5, 6, 1, 2))
    return x, (counting(program, 6, 6, 1, 1), counting(program, 4, 4, 1), at)


def of_a_mask(program: Program):
    """The padding mask of a model library: batch and key position, both counted."""
    x = program.input(real(6, 4))
    rows = program.call("aten.expand.default", counting(program, 6, 6, 1, 1), (6, 3, 4))[0]
    return x, (rows, counting(program, 4, 1, 1, 4))


def behind_others(program: Program):
    x, at = program.input(real(2, 6, 5, 3)), program.input(whole(5, 3, 6))
    return x, (None, counting(program, 6), at)


def apart(program: Program):
    x, at = program.input(real(6, 2, 5)), program.input(whole(5, 6))
    return x, (counting(program, 6), None, at)


def turned(program: Program):
    x = program.input(real(4, 6))
    return x, (counting(program, 4, 1, 4), counting(program, 6, 6, 1))


FORMS = [last_of_each, one_for_each_sample_and_head, of_a_mask, behind_others, apart, turned]


def program_of(form) -> Program:
    program = Program()
    x, indices = form(program)
    program.call("aten.index.Tensor", x, indices)
    return apply(LowerIndex(), program)


@pytest.mark.parametrize("form", FORMS)
def test_reads_the_same(form):
    program = program_of(form)
    assert not any(node.op.startswith("aten.index") for node in program.graph.nodes)
    check(program, Mesh((("one", 1),)), {})


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
@bounded(10)
def test_reads_the_same_under_any_layout(form, data):
    program = program_of(form)
    mesh = data.draw(meshes())
    check(program, mesh, {value: data.draw(layouts(value, mesh)) for value in program.graph.inputs})


def test_the_batch_stays_cut():
    program = program_of(last_of_each)
    cut = {value: Layout({"dp": Shard(0)}) for value in program.graph.inputs}
    found = check(program, Mesh((("dp", 2),)), cut)
    assert collectives(found.graph) == []
    assert next(iter(found.graph.outputs.values())).layout == Layout({"dp": Shard(0)})


GRAPH = """
    graph g {{
      input %x : float32[8, 64, 32] {{}}  # kind=slot differentiable
      input %last : int64[8] {{}}  # kind=batch
      %rows : int64[8] = aten.arange.start_step({})
      %y : float32[8, 32] = aten.index.Tensor(%x, [%rows, %last])
      output y = %y
    }}
    """


def test_the_docstring_shows_what_happens():
    shown = LowerIndex.__doc__.split("after:")[1].split("\n    \n")[0]
    lines = [line.split("(")[0].strip() for line in shown.strip().splitlines()]
    assert lines == ops(LowerIndex()(read(GRAPH.format("0, 8, 1"))))


def test_an_index_that_counts_otherwise_stays():
    graph = read(GRAPH.format("8, 0, -1"))
    assert counts_along(graph.nodes[0].outputs[0], 8) is None
    assert ops(LowerIndex()(graph))[-1] == "%y : float32[8, 32] = aten.index.Tensor"


def test_two_indices_that_read_stay():
    program = Program()
    at = program.input(torch.arange(6) % 4)
    x = program.input(real(6, 4, 4))
    program.call("aten.index.Tensor", x, (counting(program, 6), at, at))
    assert program.graph.nodes[-1].op == "aten.index.Tensor"
    apply(LowerIndex(), program)
    assert program.graph.nodes[-1].op == "aten.index.Tensor"
