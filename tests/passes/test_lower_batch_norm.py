"""Lowered batch_norm is torch's, in value, running statistics and gradient, on one device and on many."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiler.ir.graph import Origin
from compiler.layout.placement import Layout, Mesh, Partial, Shard
from compiler.layout.propagate import propagate
from compiler.passes.lower_batch_norm import LowerBatchNorm
from compiler.passes.lower_support import LoweringError
from tests.layout.differential import Program, check
from tests.layout.operators import constant, real
from tests.layout.strategies import bounded, layouts, meshes
from tests.layout.text import collectives
from tests.passes.lowered import apply, ops, read

FUNCTIONAL = "aten._native_batch_norm_legit_functional.default"
CALL = f"{FUNCTIONAL}(%x, None, None, %m, %m, True, 0.1, 1e-05)"


def batch_norm(shape: tuple[int, ...], affine: bool = True, training: bool = True, momentum: float = 0.3) -> Program:
    """A call whose results torch computes: normalised, and the new running statistics."""
    program, channels = Program(), shape[1]
    x = program.input(real(*shape))
    weight, bias = (program.input(real(channels)) if affine else None for _ in range(2))
    mean, variance = program.input(constant(channels)), program.input(constant(channels).abs() + 0.1)
    out = program.call(FUNCTIONAL, x, weight, bias, mean, variance, training, momentum, 1e-5)
    program.graph.outputs = {"y": out[0], "mean": out[3], "var": out[4]}
    for value in out[1:]:
        value.differentiable = False
    return program


@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5), (2, 3, 4, 2)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_is_what_torch_computes(shape, affine, training):
    check(apply(LowerBatchNorm(), batch_norm(shape, affine, training)), Mesh((("one", 1),)), {})


@given(data=st.data())
@bounded(40)
def test_is_synchronised_under_any_layout(data):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shape = data.draw(st.sampled_from([(6, 4), (5, 3, 2), (4, 2, 3)]))
    affine, training = data.draw(st.booleans()), data.draw(st.booleans())
    program = apply(LowerBatchNorm(), batch_norm(shape, affine, training))
    mesh = data.draw(meshes())
    check(program, mesh, {value: data.draw(layouts(value, mesh)) for value in program.graph.inputs})


def test_local_statistics_stay_one_operator_without_communication():
    program = batch_norm((8, 4, 3))
    program.graph.nodes[0].origin = Origin("stages.0.bn")
    apply(LowerBatchNorm(local=("stages.*",)), program)
    x = program.graph.inputs[0]
    found = propagate(program.graph, Mesh((("dp", 2),)), {x: Layout({"dp": Shard(0)})})
    assert set(collectives(found.graph)) <= {"vary"}
    places = {role: value.layout["dp"] for role, value in found.graph.outputs.items()}
    assert places == {"y": Shard(0), "mean": Partial("avg"), "var": Partial("avg")}


@pytest.mark.parametrize(
    "pattern, module, matches",
    [("stages.*", "stages.0.bn", True), ("stages.0", "stages.0.bn", True), ("stem", "stages.0.bn", False)],
)
def test_patterns_name_modules_and_what_is_in_them(pattern, module, matches):
    assert LowerBatchNorm((pattern,)).is_local(module) == matches


def test_one_value_per_channel_is_an_error_as_in_torch():
    graph = read(
        f"""
        graph g {{
          input %x : float32[1, 4] {{}}  # kind=slot differentiable
          input %m : float32[4] {{}}  # kind=buffer
          %y : float32[1, 4], _, _, %a : float32[4], %b : float32[4] = {CALL}
          output y = %y
        }}
        """
    )
    with pytest.raises(LoweringError, match="one value per channel"):
        LowerBatchNorm()(graph)


def test_half_precision_is_normalised_in_single():
    graph = read(
        f"""
        graph g {{
          input %x : bfloat16[8, 4] {{}}  # kind=slot differentiable
          input %m : float32[4] {{}}  # kind=buffer
          %y : bfloat16[8, 4], _, _, %a : float32[4], %b : float32[4] = {CALL}
          output y = %y
          output mean = %a
        }}
        """
    )
    found = LowerBatchNorm()(graph)
    assert ops(found)[0] == "%y.cast : float32[8, 4] = planc.cast"
    assert found.outputs["y"].dtype == "bfloat16" and found.outputs["mean"].dtype == "float32"
