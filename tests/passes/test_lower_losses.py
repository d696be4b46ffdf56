"""Lowered losses are torch's, in value and gradient, on one device and on many."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiler.layout.placement import Layout, Mesh, Shard
from compiler.passes.lower_losses import LowerLosses
from tests.layout.differential import check
from tests.layout.operators import constant, real, unit, whole
from tests.layout.strategies import bounded, layouts, meshes
from tests.layout.test_rules import as_program
from tests.passes.lowered import apply, lowered, ops, read

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def classes(shape: tuple[int, ...], count: int, weighted: bool, smoothing: float, reduction: int, ignored: int = -100):
    logits = real(shape[0], count, *shape[1:]) if shape else real(count)
    target = whole(count, *shape)
    weight = torch.rand(count, dtype=torch.float64) + 0.1 if weighted else None
    return "aten.cross_entropy_loss.default", (logits, target, weight, reduction, ignored, smoothing), {}


@pytest.mark.parametrize("shape", [(), (6,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("weighted, smoothing", list(itertools.product((False, True), (0.0, 0.1))))
@pytest.mark.parametrize("reduction", REDUCTIONS.values())
@pytest.mark.parametrize("ignored", [-100, 1])
def test_cross_entropy_of_classes(shape, weighted, smoothing, reduction, ignored):
    lowered(LowerLosses(), *classes(shape, 4, weighted, smoothing, reduction, ignored))


@pytest.mark.parametrize("shape", [(4,), (6, 4), (3, 4, 5)])
@pytest.mark.parametrize("weighted, smoothing", list(itertools.product((False, True), (0.0, 0.1))))
@pytest.mark.parametrize("reduction", REDUCTIONS.values())
def test_cross_entropy_of_probabilities(shape, weighted, smoothing, reduction):
    target = constant(*shape).softmax(0 if len(shape) == 1 else 1).requires_grad_()
    weight = torch.rand(4, dtype=torch.float64) if weighted else None
    args = (real(*shape), target, weight, reduction, -100, smoothing)
    lowered(LowerLosses(), "aten.cross_entropy_loss.default", args, {})


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS.values())
def test_nll_loss(weighted, reduction):
    weight = torch.rand(4, dtype=torch.float64) if weighted else None
    lowered(LowerLosses(), "aten.nll_loss_nd.default", (real(5, 4, 3), whole(4, 5, 3), weight, reduction, 1), {})


LOSSES: dict[str, tuple[Any, ...]] = {
    "mse_loss": (real(4, 3), real(4, 3)),
    "l1_loss": (real(4, 3), real(4, 3)),
    "smooth_l1_loss": (real(4, 3), real(4, 3)),
    "huber_loss": (real(4, 3), real(4, 3)),
    "soft_margin_loss": (real(4, 3), constant(4, 3)),
    "kl_div": (real(4, 3), unit(4, 3)),
    "binary_cross_entropy": (unit(4, 3), unit(4, 3), unit(3).detach()),
    "binary_cross_entropy_with_logits": (real(4, 3), unit(4, 3), None, unit(3).detach()),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", REDUCTIONS.values())
def test_losses_of_elements(name, reduction):
    args = LOSSES[name]
    lowered(LowerLosses(), f"aten.{name}.default", args, {"reduction": reduction})


def test_what_is_ignored_counts_for_nothing_on_ranks_without_valid_labels():
    """The case that a mean of means gets wrong: rank 0 has no valid label, rank 1 has some."""
    logits, target = real(8, 5), whole(5, 8)
    target[:5] = -100
    program = apply(LowerLosses(), as_program("aten.cross_entropy_loss.default", (logits, target), {}))
    cut = {value: Layout({"dp": Shard(0)}) for value in program.graph.inputs}
    for ways in (1, 2, 3, 4):
        check(program, Mesh((("dp", ways),)), cut)


@given(data=st.data())
@bounded(40)
def test_means_are_exact_under_any_layout(data):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shape = data.draw(st.sampled_from([(6,), (4, 3), (5, 2)]))
    weighted, smoothing = data.draw(st.booleans()), data.draw(st.sampled_from([0.0, 0.1]))
    program = apply(LowerLosses(), as_program(*classes(shape, 4, weighted, smoothing, 1, 0)))
    mesh = data.draw(meshes())
    check(program, mesh, {value: data.draw(layouts(value, mesh)) for value in program.graph.inputs})


def test_half_precision_is_summed_in_single():
    """A sum of squares may exceed float16 where their mean does not."""
    graph = read(
        """
        graph g {
          input %x : float16[64, 64] {}  # kind=slot differentiable
          input %t : float16[64, 64] {}  # kind=batch
          %loss : float16[] = aten.mse_loss.default(%x, %t)
          output loss = %loss
        }
        """
    )
    assert ops(LowerLosses()(graph)) == [
        "%loss.mse_loss : float16[64, 64] = aten.mse_loss.default",
        "%loss.cast : float32[64, 64] = planc.cast",
        "%loss.sum : float32[] = aten.sum.dim_IntList",
        "%loss.count : float32[] = planc.count",
        "%loss.div : float32[] = aten.div.Tensor",
        "%loss : float16[] = planc.cast",
    ]


def test_a_loss_without_reduction_stays():
    graph = read(
        """
        graph g {
          input %x : float32[8] {}  # kind=slot differentiable
          %l : float32[8] = aten.mse_loss.default(%x, %x, 0)
          output l = %l
        }
        """
    )
    assert ops(LowerLosses()(graph)) == ["%l : float32[8] = aten.mse_loss.default"]


def test_the_docstring_shows_what_happens():
    graph = read(
        """
        graph g {
          input %logits : float32[32, 10] {}  # kind=slot differentiable
          input %labels : int64[32] {}  # kind=batch
          %loss : float32[] = aten.cross_entropy_loss.default(%logits, %labels)
          output loss = %loss
        }
        """
    )
    shown = LowerLosses.__doc__.split("after:")[1].split("\n\n")[0]
    assert [line.split("(")[0].strip() for line in shown.strip().splitlines()] == ops(LowerLosses()(graph))
