"""The verifier between passes, and the contracts of passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, is_dataclass

import pytest

from compiler.dsl import loads
from compiler.ir.graph import Graph, Node, Value
from compiler.ir.text import parse_graph, print_graph
from compiler.ir.verify import IllFormed, verify_graph
from compiler.layout.placement import Layout, Shard
from compiler.passes.base import ContractError, run_passes
from compiler.passes.lift_vary import LiftVary
from compiler.passes.pipeline import lowering
from compiler.passes.resolve_counts import ResolveCounts

TEXT = """
graph g {
  input %x : float32[8, 4] {dp: S(0)}  # kind=batch
  input %w : float32[4, 4] {dp: V}  # kind=param differentiable
  %y : float32[8, 4] {dp: S(0)} = aten.linear.default(%x, %w)
  %z : float32[8, 4] {dp: S(0)} = aten.relu.default(%y)
  output loss = %z
}
"""
PLAN = 'model "m:M"\ninput x : float32[4]\nmesh dp=2\ndata over dp\n'


def node(graph: Graph, name: str) -> Node:
    return next(n for n in graph.nodes if any(out is not None and out.name == name for out in n.outputs))


def swap(graph: Graph) -> None:
    graph.nodes.reverse()


def duplicate(graph: Graph) -> None:
    graph.nodes.append(graph.nodes[0])


def same_name(graph: Graph) -> None:
    made = node(graph, "z").outputs[0]
    assert made is not None
    made.name = "y"


def lost(graph: Graph) -> None:
    graph.nodes.pop()


def stranger(graph: Graph) -> None:
    graph.nodes[0].args = (Value("nowhere", "float32", (8, 4)), *graph.nodes[0].args[1:])


def wrong_producer(graph: Graph) -> None:
    made = graph.nodes[1].outputs[0]
    assert made is not None
    made.producer = graph.nodes[0]


def made_input(graph: Graph) -> None:
    graph.inputs[0].producer = graph.nodes[0]


def no_such_dim(graph: Graph) -> None:
    graph.inputs[0].layout = Layout({"dp": Shard(2)})


def no_such_factor(graph: Graph) -> None:
    graph.inputs[0].layout = Layout({"dp": Shard(0, outer=3)})


BROKEN: list[tuple[Callable[[Graph], None], str]] = [
    (swap, "%y is used before it is made after breaking: %z"),
    (duplicate, "%y is defined twice"),
    (same_name, "%y is defined twice"),
    (lost, "the output loss is not made"),
    (stranger, "%nowhere is used before it is made"),
    (wrong_producer, "%z does not know its producer"),
    (made_input, "the input %x has a producer"),
    (no_such_dim, r"cannot be S\(2\) over dp"),
    (no_such_factor, r"cannot be S\(0, outer=3\) over dp"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN, ids=[damage.__name__ for damage, _ in BROKEN])
def test_an_ill_formed_graph_is_refused_behind_the_pass_that_made_it(
    damage: Callable[[Graph], None], message: str
) -> None:
    @dataclass(frozen=True)
    class Breaking:
        name: str = "breaking"
        requires: frozenset[str] = frozenset()
        provides: frozenset[str] = frozenset()

        def __call__(self, graph: Graph) -> Graph:
            damage(graph)
            return graph

    graph = parse_graph(TEXT)
    verify_graph(graph)
    with pytest.raises(IllFormed, match=message) as error:
        run_passes(graph, [Breaking()])
    assert "after breaking" in str(error.value)


@dataclass(frozen=True)
class Step:
    """A pass that changes nothing."""

    name: str
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()

    def __call__(self, graph: Graph) -> Graph:
        return graph


def test_a_pass_runs_only_where_what_it_requires_holds() -> None:
    first = Step("first", provides=frozenset({"means_lowered"}))
    second = Step("second", requires=frozenset({"means_lowered"}))
    graph = parse_graph(TEXT)
    seen: list[str] = []
    run_passes(graph, [first, second], watch=lambda name, _: seen.append(name))
    assert seen == ["first", "second"]
    with pytest.raises(ContractError, match="second requires means_lowered; known: \\[\\]"):
        run_passes(graph, [second, first])
    run_passes(graph, [second], facts={"means_lowered"})


@pytest.mark.parametrize("after_layouts", [ResolveCounts(), LiftVary()])
def test_what_reads_layouts_requires_them(after_layouts: ResolveCounts | LiftVary) -> None:
    with pytest.raises(ContractError, match=f"{after_layouts.name} requires layouts"):
        run_passes(parse_graph(TEXT), [after_layouts])


def test_every_pass_is_a_frozen_dataclass_with_an_example() -> None:
    passes = [*lowering(loads(PLAN)), ResolveCounts(), LiftVary()]
    assert len({item.name for item in passes}) == len(passes)
    for item in passes:
        assert is_dataclass(item)
        with pytest.raises(FrozenInstanceError):
            item.name = "other"  # type: ignore[misc]
        text = (type(item).__doc__ or "") + (__import__(type(item).__module__, fromlist=["_"]).__doc__ or "")
        assert "before:" in text and "after:" in text, item.name


def test_the_pipeline_keeps_its_contracts() -> None:
    known: set[str] = set()
    for item in lowering(loads(PLAN)):
        assert item.requires <= known, item.name
        known |= item.provides


def test_passes_leave_alone_what_does_not_concern_them() -> None:
    graph = parse_graph(TEXT)
    before = print_graph(graph)
    assert print_graph(run_passes(graph, lowering(loads(PLAN)))) == before
    assert print_graph(run_passes(graph, [ResolveCounts(), LiftVary()], facts={"layouts"})) == before
