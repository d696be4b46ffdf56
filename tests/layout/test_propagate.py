"""What propagation makes of small graphs, as text: each test shows one thing."""

from __future__ import annotations

import textwrap

import pytest

from compiler.ir.text import parse_graph, print_graph
from compiler.layout.placement import parse_placement
from compiler.passes.lower_batch_norm import LowerBatchNorm
from tests.layout.text import body, collectives, propagated, read

MLP = """
    graph mlp {
      input %x : float32[8, 16, 32] {dp: S(0)}  # kind=slot differentiable
      input %g : float32[32] {dp: V}  # kind=param differentiable
      input %w1 : float32[64, 32] {dp: V, tp: S(0)}  # kind=param differentiable
      input %w2 : float32[32, 64] {dp: V, tp: S(1)}  # kind=param differentiable
      %n : float32[8, 16, 32] = aten.rms_norm.default(%x, [32], %g, 1e-05)
      %h : float32[8, 16, 64] = aten.linear.default(%n, %w1)
      %a : float32[8, 16, 64] = aten.silu.default(%h)
      %o : float32[8, 16, 32] = aten.linear.default(%a, %w2)
      %y : float32[8, 16, 32] = aten.add.Tensor(%x, %o)
      output y = %y
    }
    """

ATTENTION = """
    graph attention {
      input %x : float32[2, 16, 32] {}  # kind=slot differentiable
      input %wqkv : float32[96, 32] {tp: S(0, outer=3)}  # kind=param differentiable
      input %wo : float32[32, 32] {tp: S(1)}  # kind=param differentiable
      %qkv : float32[2, 16, 96] = aten.linear.default(%x, %wqkv)
      %q : float32[2, 16, 32] = aten.slice.Tensor(%qkv, 2, 0, 32)
      %k : float32[2, 16, 32] = aten.slice.Tensor(%qkv, 2, 32, 64)
      %v : float32[2, 16, 32] = aten.slice.Tensor(%qkv, 2, 64, 96)
      %q1 : float32[2, 16, 4, 8] = aten.view.default(%q, [2, 16, 4, 8])
      %k1 : float32[2, 16, 4, 8] = aten.view.default(%k, [2, 16, 4, 8])
      %v1 : float32[2, 16, 4, 8] = aten.view.default(%v, [2, 16, 4, 8])
      %q2 : float32[2, 4, 16, 8] = aten.permute.default(%q1, [0, 2, 1, 3])
      %k2 : float32[2, 4, 16, 8] = aten.permute.default(%k1, [0, 2, 1, 3])
      %v2 : float32[2, 4, 16, 8] = aten.permute.default(%v1, [0, 2, 1, 3])
      %a : float32[2, 4, 16, 8] = planc.attention(%q2, %k2, %v2, None, True, 0.35, 0.0, 0)
      %a1 : float32[2, 16, 4, 8] = aten.permute.default(%a, [0, 2, 1, 3])
      %a2 : float32[2, 16, 32] = aten.view.default(%a1, [2, 16, 32])
      %o : float32[2, 16, 32] = aten.linear.default(%a2, %wo)
      output o = %o
    }
    """

LOSS = """
    graph loss {
      input %x : float32[8, 16, 32] {dp: S(0)}  # kind=slot differentiable
      input %w : float32[10, 32] {dp: V}  # kind=param differentiable
      input %t : int64[8, 16] {dp: S(0)}  # kind=batch
      %f : float32[128, 32] = aten.view.default(%x, [128, 32])
      %h : float32[128, 10] = aten.linear.default(%f, %w)
      %tf : int64[128] = aten.view.default(%t, [128])
      %l : float32[128] = planc.cross_entropy(%h, %tf, None, -100, 0.0)
      %s : float32[] = aten.sum.dim_IntList(%l, [0], False)
      %ne : bool[128] = aten.ne.Scalar(%tf, -100)
      %c : float32[128] = planc.cast(%ne, 'torch.float32')
      %n : float32[] = aten.sum.dim_IntList(%c, [0], False)
      %loss : float32[] = aten.div.Tensor(%s, %n)
      output loss = %loss
    }
    """


def expect(graph, text: str) -> None:
    assert body(graph) == textwrap.dedent(text).strip()


def test_column_then_row_is_one_vary_and_one_all_reduce():
    expect(
        propagated(MLP, dp=2, tp=2),
        """
        %n : float32[8, 16, 32] {dp: S(0)} = aten.rms_norm.default(%x, [32], %g, 1e-05)
        %n.1 : float32[8, 16, 32] {dp: S(0), tp: V} = planc.vary(%n, ['tp'])
        %h : float32[8, 16, 64] {dp: S(0), tp: S(2)} = aten.linear.default(%n.1, %w1)
        %a : float32[8, 16, 64] {dp: S(0), tp: S(2)} = aten.silu.default(%h)
        %o : float32[8, 16, 32] {dp: S(0), tp: P} = aten.linear.default(%a, %w2)
        %o.1 : float32[8, 16, 32] {dp: S(0)} = planc.all_reduce(%o, ['tp'], 'sum')
        %y : float32[8, 16, 32] {dp: S(0)} = aten.add.Tensor(%x, %o.1)
        """,
    )


def test_over_a_sequence_that_is_cut_they_are_a_gather_and_a_reduce_scatter():
    """And the weight of the norm, used on different positions by different ranks, has a gradient to be summed."""
    text = MLP.replace("{dp: S(0)}  # kind=slot", "{dp: S(0), tp: S(1)}  # kind=slot")
    expect(
        propagated(text, dp=2, tp=2),
        """
        %g.1 : float32[32] {dp: V, tp: V} = planc.vary(%g, ['tp'])
        %n : float32[8, 16, 32] {dp: S(0), tp: S(1)} = aten.rms_norm.default(%x, [32], %g.1, 1e-05)
        %n.1 : float32[8, 16, 32] {dp: S(0), tp: V} = planc.all_gather(%n, ['tp'], 1, 1, 16, 1)
        %h : float32[8, 16, 64] {dp: S(0), tp: S(2)} = aten.linear.default(%n.1, %w1)
        %a : float32[8, 16, 64] {dp: S(0), tp: S(2)} = aten.silu.default(%h)
        %o : float32[8, 16, 32] {dp: S(0), tp: P} = aten.linear.default(%a, %w2)
        %o.1 : float32[8, 16, 32] {dp: S(0), tp: S(1)} = planc.reduce_scatter(%o, ['tp'], 1, 1, 16, 1)
        %y : float32[8, 16, 32] {dp: S(0), tp: S(1)} = aten.add.Tensor(%x, %o.1)
        """,
    )


def test_an_axis_of_size_one_communicates_nothing():
    assert set(collectives(propagated(MLP, dp=1, tp=1))) <= {"vary", "alias", "first"}


def test_a_fused_projection_is_cut_by_heads_through_to_attention():
    graph = propagated(ATTENTION, tp=2)
    layouts = {value.name: str(value.layout) for value in graph.values()}
    assert layouts["qkv"] == "{tp: S(2, outer=3)}"
    assert layouts["q"] == layouts["k"] == layouts["v"] == "{tp: S(2)}"
    assert layouts["a"] == "{tp: S(1)}"
    assert layouts["o"] == "{tp: P}"
    assert collectives(graph) == ["vary", "attention"]


def test_more_ranks_than_heads_gather_what_cannot_be_cut_so():
    """Eight ways cut a head in two, which attention cannot work on."""
    graph = propagated(ATTENTION, tp=8)
    assert collectives(graph).count("all_gather") == 3


def test_fewer_key_heads_than_ranks_leave_the_groups_of_query_heads_to_cut():
    graph = propagated(
        """
        graph grouped {
          input %q : float32[2, 8, 16, 4] {tp: S(1, outer=2)}  # kind=slot differentiable
          input %k : float32[2, 2, 16, 4] {}  # kind=slot differentiable
          input %v : float32[2, 2, 16, 4] {}  # kind=slot differentiable
          %a : float32[2, 8, 16, 4] = planc.attention(%q, %k, %v, None, True, 0.5, 0.0, 0)
          output a = %a
        }
        """,
        tp=4,
    )
    assert collectives(graph) == ["vary", "vary", "attention"]
    assert str(graph.outputs["a"].layout) == "{tp: S(1, outer=2)}"


@pytest.mark.parametrize("ways, place", [(2, "S(0)"), (4, "S(0)"), (3, "S(0, unit=16)")])
def test_flattening_batch_and_sequence_keeps_the_cut_of_the_batch(ways: int, place: str):
    """Cut evenly it is a cut of the product; unevenly it goes by whole samples."""
    values = {value.name: value for value in propagated(LOSS, dp=ways).values()}
    assert values["h"].layout["dp"] == parse_placement(place)


def test_a_mean_over_uneven_parts_masks_the_padding_and_reduces_the_count_alone():
    expect(
        propagated(LOSS, dp=3),
        """
        %f : float32[128, 32] {dp: S(0, unit=16)} = aten.view.default(%x, [128, 32])
        %h : float32[128, 10] {dp: S(0, unit=16)} = aten.linear.default(%f, %w)
        %tf : int64[128] {dp: S(0, unit=16)} = aten.view.default(%t, [128])
        %l : float32[128] {dp: S(0, unit=16)} = planc.cross_entropy(%h, %tf, None, -100, 0.0)
        %l.1 : float32[128] {dp: S(0, unit=16)} = planc.mask(%l, ['dp'], 0, 1, 8, 16, 8, 'sum')
        %s : float32[] {dp: P} = aten.sum.dim_IntList(%l.1, [0], False)
        %ne : bool[128] {dp: S(0, unit=16)} = aten.ne.Scalar(%tf, -100)
        %c : float32[128] {dp: S(0, unit=16)} = planc.cast(%ne, 'torch.float32')
        %c.1 : float32[128] {dp: S(0, unit=16)} = planc.mask(%c, ['dp'], 0, 1, 8, 16, 8, 'sum')
        %n : float32[] {dp: P} = aten.sum.dim_IntList(%c.1, [0], False)
        %n.1 : float32[] {} = planc.all_reduce(%n, ['dp'], 'sum')
        %loss : float32[] {dp: P} = aten.div.Tensor(%s, %n.1)
        """,
    )


def test_a_contraction_over_uneven_parts_masks_one_operand():
    graph = propagated(
        """
        graph uneven {
          input %x : float32[8, 7] {tp: S(1)}  # kind=slot differentiable
          input %w : float32[4, 7] {tp: S(1)}  # kind=param differentiable
          %o : float32[8, 4] = aten.linear.default(%x, %w)
          output o = %o
        }
        """,
        tp=2,
    )
    expect(
        graph,
        """
        %x.1 : float32[8, 7] {tp: S(1)} = planc.mask(%x, ['tp'], 1, 1, 7, 1, 7, 'sum')
        %o : float32[8, 4] {tp: P} = aten.linear.default(%x.1, %w)
        """,
    )


def test_the_bias_of_a_row_cut_linear_is_added_by_one_rank():
    graph = propagated(
        """
        graph row {
          input %x : float32[8, 32] {tp: S(1)}  # kind=slot differentiable
          input %w : float32[16, 32] {tp: S(1)}  # kind=param differentiable
          input %b : float32[16] {}  # kind=param differentiable
          %o : float32[8, 16] = aten.linear.default(%x, %w, %b)
          output o = %o
        }
        """,
        tp=2,
    )
    expect(
        graph,
        """
        %b.1 : float32[16] {tp: V} = planc.vary(%b, ['tp'])
        %b.1.1 : float32[16] {tp: P} = planc.first(%b.1, 'tp')
        %o : float32[8, 16] {tp: P} = aten.linear.default(%x, %w, %b.1.1)
        """,
    )


def test_one_vary_serves_all_projections():
    graph = propagated(
        """
        graph three {
          input %x : float32[8, 32] {}  # kind=slot differentiable
          input %q : float32[16, 32] {tp: S(0)}  # kind=param differentiable
          input %k : float32[16, 32] {tp: S(0)}  # kind=param differentiable
          %a : float32[8, 16] = aten.linear.default(%x, %q)
          %b : float32[8, 16] = aten.linear.default(%x, %k)
          output a = %a
          output b = %b
        }
        """,
        tp=2,
    )
    assert collectives(graph) == ["vary"]


def test_a_transposed_weight_is_cut_and_varied_at_the_parameter():
    """So that the reduction of its gradient can leave the segment."""
    graph = propagated(
        """
        graph transposed {
          input %x : float32[8, 32] {dp: S(0)}  # kind=slot differentiable
          input %w : float32[16, 32] {}  # kind=param differentiable
          %t : float32[32, 16] = aten.permute.default(%w, [1, 0])
          %y : float32[8, 16] = aten.mm.default(%x, %t)
          output y = %y
        }
        """,
        dp=2,
    )
    expect(
        graph,
        """
        %w.1 : float32[16, 32] {dp: V} = planc.vary(%w, ['dp'])
        %t.1 : float32[32, 16] {dp: V} = aten.permute.default(%w.1, [1, 0])
        %y : float32[8, 16] {dp: S(0)} = aten.mm.default(%x, %t.1)
        """,
    )


def test_each_rank_makes_its_part_of_a_mask():
    graph = propagated(
        """
        graph mask {
          input %x : float32[4, 8, 8] {cp: S(1)}  # kind=slot differentiable
          %i : int64[8] = aten.arange.start_step(0, 8, 1, dtype='torch.int64')
          %j : int64[8, 1] = aten.view.default(%i, [8, 1])
          %m : bool[8, 8] = aten.gt.Tensor(%i, %j)
          %e : bool[4, 8, 8] = aten.expand.default(%m, [4, 8, 8])
          %y : float32[4, 8, 8] = aten.masked_fill.Scalar(%x, %e, 0.0)
          output y = %y
        }
        """,
        cp=2,
    )
    expect(
        graph,
        """
        %i : int64[8] {} = aten.arange.start_step(0, 8, 1, dtype='torch.int64')
        %i.1 : int64[8] {cp: S(0)} = planc.shard(%i, ['cp'], 0, 1, 8, 1)
        %j.1 : int64[8, 1] {cp: S(0)} = aten.view.default(%i.1, [8, 1])
        %m.1 : bool[8, 8] {cp: S(0)} = aten.gt.Tensor(%i, %j.1)
        %e.1 : bool[4, 8, 8] {cp: S(1)} = aten.expand.default(%m.1, [4, 8, 8])
        %y : float32[4, 8, 8] {cp: S(1)} = aten.masked_fill.Scalar(%x, %e.1, 0.0)
        """,
    )


def test_synchronised_batch_norm_reduces_two_statistics_once():
    """The running statistics take what is reduced for the normalisation."""
    call = "aten._native_batch_norm_legit_functional.default(%x, %w, %b, %rm, %rv, True, 0.1, 1e-05)"
    text = f"""
        graph bn {{
          input %x : float32[8, 4, 5] {{dp: S(0)}}  # kind=slot differentiable
          input %w : float32[4] {{dp: V}}  # kind=param differentiable
          input %b : float32[4] {{dp: V}}  # kind=param differentiable
          input %rm : float32[4] {{}}  # kind=buffer
          input %rv : float32[4] {{}}  # kind=buffer
          %y : float32[8, 4, 5], _, _, %m : float32[4], %v : float32[4] = {call}
          output y = %y
          output buffer:rm = %m
          output buffer:rv = %v
        }}
        """
    lowered = print_graph(LowerBatchNorm()(read(text)))
    graph = propagated(lowered, dp=2)
    assert [op for op in collectives(graph) if op != "count"] == ["all_reduce", "vary", "all_reduce", "vary"]
    assert {str(graph.outputs[f"buffer:{name}"].layout) for name in ("rm", "rv")} == {"{}"}


def test_what_differs_over_an_axis_makes_all_that_meets_it_differ():
    """The gradient of the other operand is a term of a sum as well."""
    graph = propagated(
        """
        graph varying {
          input %x : float32[4] {tp: V}  # kind=slot differentiable
          input %w : float32[4] {}  # kind=param differentiable
          %y : float32[4] = aten.mul.Tensor(%x, %w)
          output y = %y
        }
        """,
        tp=2,
    )
    expect(
        graph,
        """
        %w.1 : float32[4] {tp: V} = planc.vary(%w, ['tp'])
        %y : float32[4] {tp: V} = aten.mul.Tensor(%x, %w.1)
        """,
    )


def test_an_operator_without_a_rule_is_whole():
    graph = propagated(
        """
        graph unknown {
          input %x : float32[4, 8] {dp: S(0)}  # kind=slot differentiable
          input %z : float32[4, 8] {}  # kind=slot
          %y : float32[4, 4] = aten.cdist.default(%x, %z)
          output y = %y
        }
        """,
        dp=2,
    )
    assert collectives(graph) == ["all_gather"]


@pytest.mark.parametrize("text, mesh", [(MLP, {"dp": 2, "tp": 2}), (ATTENTION, {"tp": 2}), (LOSS, {"dp": 3})])
def test_what_is_printed_reads_back(text: str, mesh: dict[str, int]):
    printed = print_graph(propagated(text, **mesh))
    assert print_graph(parse_graph(printed)) == printed
