"""Lowered means and variances are torch's, in value and gradient, on one device and on many."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiler.passes.lower_mean import LowerMean
from tests.layout.differential import check
from tests.layout.operators import real
from tests.layout.strategies import bounded, layouts, meshes
from tests.layout.test_rules import as_program
from tests.passes.lowered import apply, lowered, ops, read

CALLS = {
    "mean": ("aten.mean.default", (), {}),
    "mean over dimensions": ("aten.mean.dim", ((0, -1),), {}),
    "mean, kept": ("aten.mean.dim", ((1,), True), {}),
    "mean in another type": ("aten.mean.dim", ((1,),), {"dtype": "torch.float32"}),
    "var": ("aten.var.default", (), {}),
    "var, biased": ("aten.var.default", (False,), {}),
    "var over a dimension": ("aten.var.dim", ((1,), True, True), {}),
    "var, corrected": ("aten.var.correction", ((0, 2),), {"correction": 2}),
    "var, torch's default": ("aten.var.correction", (), {}),
    "std": ("aten.std.correction", ((1,),), {"correction": 0, "keepdim": True}),
    "std over all": ("aten.std.default", (), {}),
    "var_mean": ("aten.var_mean.correction", ((1,),), {"correction": 1}),
    "var_mean, kept": ("aten.var_mean.dim", ((0,), False, True), {}),
    "std_mean": ("aten.std_mean.default", (), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_is_what_torch_computes(name: str):
    op, args, kwargs = CALLS[name]
    lowered(LowerMean(), op, (real(4, 3, 5), *args), kwargs)


@pytest.mark.parametrize("name", CALLS)
@given(data=st.data())
@bounded(5)
def test_is_exact_under_any_layout(name: str, data: st.DataObject):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    op, args, kwargs = CALLS[name]
    if "dtype" in kwargs:
        return
    program = apply(LowerMean(), as_program(op, (real(4, 3, 5), *args), kwargs))
    mesh = data.draw(meshes())
    check(program, mesh, {value: data.draw(layouts(value, mesh)) for value in program.graph.inputs})


def test_the_deviation_of_equal_numbers_has_no_gradient():
    value = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    lowered(LowerMean(), "aten.std.dim", (value, (1,)), {})


def test_no_degrees_of_freedom_are_not_negative():
    lowered(LowerMean(), "aten.var.correction", (real(4, 1), (1,)), {"correction": 1})


def test_a_mean_of_a_scalar_is_itself():
    lowered(LowerMean(), "aten.mean.default", (real(),), {})


def test_half_precision_is_summed_in_single():
    graph = read(
        """
        graph g {
          input %x : bfloat16[64, 64] {}  # kind=slot differentiable
          %m : bfloat16[64] = aten.mean.dim(%x, [0])
          output m = %m
        }
        """
    )
    assert ops(LowerMean()(graph)) == [
        "%m.cast : float32[64, 64] = planc.cast",
        "%m.sum : float32[64] = aten.sum.dim_IntList",
        "%m.count : float32[] = planc.count",
        "%m.div : float32[64] = aten.div.Tensor",
        "%m : bfloat16[64] = planc.cast",
    ]


def test_the_docstring_shows_what_happens():
    graph = read(
        """
        graph g {
          input %x : float32[8, 4] {}  # kind=slot differentiable
          %m : float32[4] = aten.mean.dim(%x, [0])
          output m = %m
        }
        """
    )
    shown = LowerMean.__doc__.split("after:")[1]
    assert [line.split("(")[0].strip() for line in shown.strip().splitlines()] == ops(LowerMean()(graph))
