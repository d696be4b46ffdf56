"""Pieces: a graph cut where another value begins to meet weights.

    [norm, wq, wk, wv, attention]  [wo, add, norm]  [w1, w3, silu, mul]  [w2, add, …

The weights of a piece calculate with one value (queries, keys and values; gate and up), so what is best for them is
best decided together; and between pieces only the layouts of few values matter. Pieces that are equal, as those of
repeated layers are, have equal keys. A view of a weight stands where it is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from compiler.ir.graph import Graph, Node, Value
from compiler.layout.rule import rule_of
from compiler.segments.canonical import canonical, key
from compiler.segments.split import Segment
from compiler.tensor.uses import Users, uses


@dataclass(eq=False)
class Piece:
    """A run of nodes, the values that it reads, and those that it makes for later ones or for the graph's outputs."""

    nodes: list[Node] = field(default_factory=list)
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    key: str = ""

    @property
    def graph(self) -> Graph:
        outputs = {f"out{k}": value for k, value in enumerate(self.outputs)}
        return Graph("piece", list(self.inputs), list(self.nodes), outputs)


def pieces(graph: Graph, weights: Collection[Value], users: Users) -> list[Piece]:
    """The graph's nodes as pieces, in order. `weights` are the parameters that can be cut in ways of their own."""
    met = _met(weights, users)
    found = [Piece()]
    roots: frozenset[Value] | None = None
    derived, waiting = set(weights), {}
    for node in graph.nodes:
        if rule_of(node).cheap and node.inputs and derived.issuperset(node.inputs):  # goes with what calculates with it
            made = [out for out in node.outputs if out is not None]
            derived.update(made)
            waiting.update(dict.fromkeys(made, node))
            continue
        values = met.get(node)
        if values is not None and values != roots:
            if roots is not None:
                found.append(Piece())
            roots = values
        found[-1].nodes += [*_taken(node.inputs, waiting), node]
    found[-1].nodes += _taken(list(waiting), waiting)
    _connect(graph, found)
    return found


def _taken(values: Iterable[Value], waiting: dict[Value, Node]) -> list[Node]:
    """The nodes that are waited for to make the values, in order; none of them waits any longer."""
    found: list[Node] = []
    for value in values:
        node = waiting.get(value)
        if node is not None:
            for out in node.outputs:
                waiting.pop(out, None)
            found += [*_taken(node.inputs, waiting), node]
    return found


def _met(weights: Collection[Value], users: Users) -> dict[Node, frozenset[Value]]:
    """For each operator that calculates with a weight, the values that it meets there."""
    found: dict[Node, frozenset[Value]] = {}
    for weight in weights:
        for use in uses(weight, users):
            addends = rule_of(use.node).addends
            others = (value for k, value in enumerate(use.node.inputs) if k != use.k and k not in addends)
            found[use.node] = found.get(use.node, frozenset()) | {_root(value) for value in others}
    return found


def _root(value: Value) -> Value:
    """The value that this one is a view of."""
    while value.producer is not None and rule_of(value.producer).cheap and len(value.producer.inputs) == 1:
        value = value.producer.inputs[0]
    return value


def _connect(graph: Graph, found: list[Piece]) -> None:
    home = {out: piece for piece in found for node in piece.nodes for out in node.outputs if out is not None}
    leaving = set(graph.outputs.values())
    for piece in found:
        reads = dict.fromkeys(value for node in piece.nodes for value in node.inputs)
        piece.inputs = tuple(value for value in reads if home.get(value) is not piece)
        leaving.update(value for value in piece.inputs if value in home)
    for piece in found:
        made = [out for node in piece.nodes for out in node.outputs if out is not None]
        piece.outputs = tuple(value for value in made if value in leaving)
        piece.key = key(canonical(Segment("piece", "", piece.nodes, list(piece.inputs), list(piece.outputs))))
