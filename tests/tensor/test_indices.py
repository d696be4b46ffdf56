"""Which indices a dimension is made of, and how they are divided."""

from __future__ import annotations

import textwrap

import pytest

from compiler.ir.text import parse_graph
from compiler.layout.placement import Mesh
from compiler.tensor.divide import Division, products
from compiler.tensor.indices import Index, Indices, by_parts, follow, leaves, unify


def found_indices(text: str, **seeds: int) -> dict[str, Indices]:
    """For each parameter the indices of its dimensions; `seeds` are dimensions by parameter name."""
    graph = parse_graph(textwrap.dedent(text))
    known = follow(graph, {value: (seeds[value.name],) for value in graph.inputs if value.name in seeds})
    return {value.name: known[value] for value in graph.inputs if value in known}


def indices(text: str, **seeds: int) -> dict[str, list[list[tuple[int, bool]]]]:
    """For each parameter and dimension, the (size, whole) of its indices."""
    found = found_indices(text, **seeds)
    return {name: [[(leaf.size, leaf.whole) for leaf in leaves(dim)] for dim in dims] for name, dims in found.items()}


def parts(text: str, **seeds: int) -> dict[str, list[list[tuple[int, bool]]]]:
    """For each of the seeds and each part of its dimension, the (size, free) of its indices."""
    found = found_indices(text, **seeds)
    return {
        name: [[(leaf.size, leaf.is_free) for leaf in part] for part in by_parts(leaves(found[name][dim]))]
        for name, dim in seeds.items()
    }


ATTENTION = """
graph attention {
  input %x : float32[2, 8, 32]  # kind=slot differentiable
  input %wq : float32[32, 32]  # kind=param differentiable
  input %wk : float32[8, 32]  # kind=param differentiable
  input %wo : float32[32, 32]  # kind=param differentiable
  %q : float32[2, 8, 32] = aten.linear.default(%x, %wq)
  %k : float32[2, 8, 8] = aten.linear.default(%x, %wk)
  %q4 : float32[2, 8, 8, 4] = aten.view.default(%q, [2, 8, 8, 4])
  %k4 : float32[2, 8, 2, 4] = aten.view.default(%k, [2, 8, 2, 4])
  %qt : float32[2, 8, 8, 4] = aten.transpose.int(%q4, 1, 2)
  %kt : float32[2, 2, 8, 4] = aten.transpose.int(%k4, 1, 2)
  %a : float32[2, 8, 8, 4] = planc.attention(%qt, %kt, %kt, None, True, 0.5, 0.0, None)
  %at : float32[2, 8, 8, 4] = aten.transpose.int(%a, 1, 2)
  %o : float32[2, 8, 32] = aten.view.default(%at, [2, 8, 32])
  %y : float32[2, 8, 32] = aten.linear.default(%o, %wo)
  output out = %y
}
"""


def test_attention_takes_a_projection_apart() -> None:
    found = indices(ATTENTION, wq=0, wk=0)
    assert found["wq"][0] == [(2, False), (4, False), (4, True)], "key heads, groups, width"
    assert found["wk"][0] == [(2, False), (4, True)]
    assert found["wo"][1] == found["wq"][0], "found without being asked for"


def test_a_fused_projection_is_cut_inside_its_thirds() -> None:
    found = parts(
        """
        graph fused {
          input %x : float32[2, 8, 16]  # kind=slot differentiable
          input %w : float32[48, 16]  # kind=param differentiable
          %z : float32[2, 8, 48] = aten.linear.default(%x, %w)
          %k : float32[2, 8, 16] = aten.slice.Tensor(%z, 2, 16, 32)
          output out = %k
        }
        """,
        w=0,
    )
    assert found["w"] == [[(16, True)]] * 3


FUSED = """
graph fused {
  input %x : float32[2, 8, 32]  # kind=slot differentiable
  input %w : float32[48, 32]  # kind=param differentiable
  %z : float32[2, 8, 48] = aten.linear.default(%x, %w)
  SPLIT
  %qt : float32[2, 8, 8, 4] = aten.transpose.int(%q4, 1, 2)
  %kt : float32[2, 2, 8, 4] = aten.transpose.int(%k4, 1, 2)
  %vt : float32[2, 2, 8, 4] = aten.transpose.int(%v4, 1, 2)
  %a : float32[2, 8, 8, 4] = planc.attention(%qt, %kt, %vt, None, True, 0.5, 0.0, None)
  output out = %a
}
"""
SPLITS = {
    "slices, then heads": """\
  %q : float32[2, 8, 32] = aten.slice.Tensor(%z, 2, 0, 32)
  %k : float32[2, 8, 8] = aten.slice.Tensor(%z, 2, 32, 40)
  %v : float32[2, 8, 8] = aten.slice.Tensor(%z, 2, 40, 48)
  %q4 : float32[2, 8, 8, 4] = aten.view.default(%q, [2, 8, 8, 4])
  %k4 : float32[2, 8, 2, 4] = aten.view.default(%k, [2, 8, 2, 4])
  %v4 : float32[2, 8, 2, 4] = aten.view.default(%v, [2, 8, 2, 4])""",
    "heads, then a split": """\
  %z4 : float32[2, 8, 12, 4] = aten.view.default(%z, [2, 8, 12, 4])
  %q4 : float32[2, 8, 8, 4], %k4 : float32[2, 8, 2, 4], %v4 : float32[2, 8, 2, 4] = aten.split_with_sizes.default(%z4, [8, 2, 2], 2)""",
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_fused_projection_has_parts(split: str) -> None:
    found = parts(FUSED.replace("  SPLIT", SPLITS[split]), w=0)
    key = [(2, True), (4, False)]
    assert found["w"] == [[(2, True), (4, True), (4, False)], key, key], "key heads, groups, width"


def test_parts_that_do_not_align_with_a_view_are_whole() -> None:
    """A split between heads, and a reading of the same as heads of another width."""
    found = parts(
        """
        graph fused {
          input %x : float32[2, 16]  # kind=slot differentiable
          input %w : float32[12, 16]  # kind=param differentiable
          %z : float32[2, 12] = aten.linear.default(%x, %w)
          %a : float32[2, 3] = aten.slice.Tensor(%z, 1, 0, 3)
          %b : float32[2, 6, 2] = aten.view.default(%z, [2, 6, 2])
          output a = %a
          output b = %b
        }
        """,
        w=0,
    )
    assert found["w"] == [[(6, False), (2, False)]]


def test_what_a_norm_reads_is_whole() -> None:
    found = indices(
        """
        graph norm {
          input %x : float32[2, 8, 16]  # kind=slot differentiable
          input %w : float32[16, 16]  # kind=param differentiable
          %z : float32[2, 8, 16] = aten.linear.default(%x, %w)
          %y : float32[2, 8, 16] = aten.rms_norm.default(%z, [16])
          output out = %y
        }
        """,
        w=0,
    )
    assert found["w"][0] == [(16, True)]


def test_two_readings_without_a_common_factor_are_whole() -> None:
    one, other = [Index(6), Index(4)], [Index(4), Index(6)]
    unify(one, other)
    assert all(leaf.whole for leaf in leaves(one))


@pytest.mark.parametrize(
    ("runs", "ways", "sub_axes"),
    [
        ([[2, 4]], 8, (2, 4)),
        ([[64]], 8, (8,)),
        ([[3, 2]], 4, (4,)),
        ([[3, 2]], 2, (2,)),  # three and two halves of the groups rather than two of three heads
        ([[2, 4], [4, 2]], 8, (2, 2, 2)),
        ([[2, 3], [3, 2]], 6, (2, 3)),  # 2 x 3 and 3 x 2 have no common sub-axes
    ],
)
def test_division(runs: list[list[int]], ways: int, sub_axes: tuple[int, ...]) -> None:
    division = Division(Mesh((("tp", ways),)), ["tp"])
    for run in runs:
        division.divide([Index(size) for size in run])
    assert division.sub_axes() == {"tp": sub_axes}


def test_several_axes_of_a_plan_keep_their_bounds() -> None:
    division = Division(Mesh((("a", 2), ("b", 4))), ["a", "b"])
    run = [Index(4), Index(2)]
    division.divide(run)
    assert division.sub_axes() == {"a": (2,), "b": (2, 2)}
    mesh = Mesh((("a", 2), ("b", 4))).split(division.sub_axes())
    assert [division.cut_by(index, mesh) for index in run] == [("a", "b.0"), ("b.1",)]


def test_products() -> None:
    assert sorted(products(8, 2)) == [(1, 8), (2, 4), (4, 2), (8, 1)]
