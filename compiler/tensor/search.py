"""The search for the cheapest cuts of the weights: dynamic programming over the pieces of a graph.

Between pieces, all that matters of the decisions so far are the layouts of the values that are still to be used, the
*state*. From each state a piece is propagated with every combination of its weights' options: those that meet one value
are cut in one style or stay whole, and those of one shape (keys and values) move together. Of the ways into one state
the cheapest is kept, and of the states the cheapest few. Equal pieces in equal states are propagated once: the eighty
layers of a model cost little more than one.

The costs are those of propagation itself (`tensor/cost.py`). What an earlier piece redistributed, later ones find.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compiler.ir.graph import Graph, Node, Value
from compiler.layout.placement import Layout, Mesh, Placement, Shard
from compiler.layout.propagate import Decision, propagate
from compiler.tensor.communication import Cost, communication
from compiler.tensor.cost import reduced_gradients, undivided_memory, undivided_work
from compiler.tensor.pieces import pieces
from compiler.tensor.uses import Users

STATES = 16
"""States kept after each piece."""
SMALL = 16
"""How many times smaller than another a weight is that may stay whole beside it (an adapter, a gate)."""
COMBINATIONS = 64
"""Beyond so many combinations in one piece, all of its weights move together."""


Options = tuple[tuple[str, Layout], ...]
"""Styles ("row", "column", "vocab", or "whole") and their layouts. Of equal ones the first is taken."""


@dataclass(frozen=True)
class Space:
    """What is to be decided.

    `options`: for each weight with ways of its own, its layouts over `axes` to choose from, by style.
    `followers`: parameters that may be stored cut as their one operator wants them. `layouts`: those of the graph's
    inputs over the other axes. `placed`: values that a strategy puts somewhere. `methods`: those of operators.
    """

    graph: Graph
    mesh: Mesh
    axes: tuple[str, ...]
    layouts: Mapping[Value, Layout]
    options: Mapping[Value, Options]
    followers: frozenset[Value]
    placed: Mapping[Value, Layout]
    methods: Mapping[str, str]


@dataclass(frozen=True)
class Held:
    """Of a value: its layout, and those that it was also brought to."""

    layout: Layout
    made: frozenset[Layout] = frozenset()


State = tuple[Held, ...]
"""Of the values that are still to be used."""


@dataclass(frozen=True)
class Outcome:
    """A piece propagated one way: what it costs, what it leaves of its inputs and outputs, how the parameters that it is
    the first to use are stored, and which of its outputs stay whole, once they are."""

    cost: Cost
    inputs: State
    outputs: State
    stored: tuple[Layout, ...]
    kept: tuple[bool, ...]


@dataclass(frozen=True)
class Path:
    """The cheapest way found to a state: through the last piece, and the path before."""

    cost: Cost
    last: Outcome | None = None
    before: Path | None = None


@dataclass(frozen=True)
class Choice:
    """The layouts of all parameters that the graph uses, and values that are to be whole over the tensor axes."""

    layouts: Mapping[Value, Layout]
    whole: tuple[Value, ...]


def cheapest(space: Space, users: Users) -> Choice:
    return _Search(space, users).run()


class _Search:
    def __init__(self, space: Space, users: Users):
        self.space = space
        self.pieces = pieces(space.graph, space.options.keys(), users)
        self.last = {value: k for k, piece in enumerate(self.pieces) for value in piece.inputs}
        self.fresh = self.first_used()
        self.known: dict[Any, list[Outcome]] = {}
        self.decisions: dict[Any, Decision] = {}

    def first_used(self) -> list[tuple[Value, ...]]:
        """The parameters that each piece is the first to use."""
        seen: set[Value] = set()
        found = []
        for piece in self.pieces:
            found.append(tuple(v for v in piece.inputs if v.kind == "param" and v not in seen))
            seen.update(piece.inputs)
        return found

    def run(self) -> Choice:
        live: tuple[Value, ...] = ()
        states: dict[State, Path] = {(): Path(Cost())}
        for k, piece in enumerate(self.pieces):
            passing = tuple(value for value in live if self.last[value] > k)
            made = (*self.fresh[k], *piece.outputs)
            live, before = (*passing, *(v for v in made if self.last.get(v, 0) > k)), live
            states = self.advanced(k, before, live, states)
        return self.chosen(min(states.values(), key=lambda path: path.cost))

    def chosen(self, path: Path) -> Choice:
        layouts: dict[Value, Layout] = {}
        whole: list[Value] = []
        for k in reversed(range(len(self.pieces))):
            assert path.last is not None and path.before is not None
            layouts.update(zip(self.fresh[k], path.last.stored))
            whole += [value for value, kept in zip(self.pieces[k].outputs, path.last.kept) if kept]
            path = path.before
        return Choice(layouts, tuple(whole))

    def advanced(
        self, k: int, before: tuple[Value, ...], live: tuple[Value, ...], states: Mapping[State, Path]
    ) -> dict[State, Path]:
        """The states behind piece k: the cheapest few, each with the cheapest path to it."""
        piece, found = self.pieces[k], {}
        for state, path in states.items():
            held = dict(zip(before, state))
            given = tuple(held.get(value) or self.at_first(value) for value in piece.inputs)
            for outcome in self.outcomes(k, given):
                held.update(zip(piece.inputs, outcome.inputs))
                held.update(zip(piece.outputs, outcome.outputs))
                after = tuple(held[value] for value in live)
                cost = path.cost + outcome.cost
                if after not in found or cost < found[after].cost:
                    found[after] = Path(cost, outcome, path)
        ranked = sorted(found.items(), key=lambda item: item[1].cost)
        return dict(ranked[:STATES])

    def at_first(self, value: Value) -> Held:
        return Held(self.space.layouts.get(value, Layout()))

    # -- one piece -----------------------------------------------------------------------------------------------

    def outcomes(self, k: int, given: State) -> list[Outcome]:
        """Every way through piece k from inputs held so; equal pieces share them."""
        piece, space = self.pieces[k], self.space
        fresh = set(self.fresh[k])
        asked = tuple(
            (value in fresh, space.options.get(value, ()), self.follows(k, value)) for value in piece.inputs
        )
        placed = tuple(space.placed.get(out) for node in piece.nodes for out in node.outputs if out is not None)
        alike = (piece.key, given, asked, placed if any(placed) else None)
        if alike not in self.known:
            self.known[alike] = [
                each for chosen in self.combinations(k) for each in self.kept_whole(self.propagated(k, given, chosen))
            ]
        return self.known[alike]

    def follows(self, k: int, value: Value) -> bool:
        """Whether a parameter may be stored as this piece alone wants it."""
        return value in self.space.followers and self.last[value] == k and value in self.fresh[k]

    def combinations(self, k: int) -> list[dict[Value, Layout]]:
        """The layouts to try for the weights that the piece is the first to use: all in one style, or whole; small ones
        also whole beside the others. A weight that has one option keeps it."""
        groups: dict[Any, list[Value]] = {}
        for value in self.fresh[k]:
            if options := self.space.options.get(value):
                groups.setdefault((value.shape, options), []).append(value)
        found: dict[tuple[Layout, ...], None] = {}
        largest = max((math.prod(shape) for shape, _ in groups), default=0)
        for styles in (("row",), ("column", "vocab"), ()):
            sets = [_in_style(options, styles, math.prod(shape) * SMALL <= largest) for shape, options in groups]
            if math.prod(map(len, sets)) > COMBINATIONS:
                sets = [each[:1] for each in sets]
            found |= dict.fromkeys(itertools.product(*sets))
        return [
            {value: layout for group, layout in zip(groups.values(), layouts) for value in group} for layouts in found
        ]

    def propagated(self, k: int, given: State, chosen: Mapping[Value, Layout]) -> Outcome:
        piece, space = self.pieces[k], self.space
        layouts = {value: _over(held.layout, chosen.get(value)) for value, held in zip(piece.inputs, given)}
        before = {value: held.made for value, held in zip(piece.inputs, given)}
        found = propagate(
            piece.graph, space.mesh, layouts, placed=space.placed, methods=space.methods, made=before, decisions=self.decisions
        )
        graph = found.graph
        graph.remove_dead()
        stored, free = dict(layouts), set()
        readers = graph.users()
        for value in piece.inputs:
            if self.follows(k, value) and (cuts := self.only_cuts(readers.get(found.values[value], ()))):
                free.update(cuts)
                stored[value] = _over(layouts[value], cuts[0].outputs[0].layout)
        kept = [(value, stored[value]) for value in self.fresh[k]]
        weights = [(value, layout) for value, layout in kept if value in space.options]
        cost = (
            communication((node for node in graph.nodes if node not in free), space.mesh, space.axes)
            + undivided_work(graph, space.mesh, space.axes)
            + undivided_memory(weights, space.mesh, space.axes)
            + reduced_gradients(weights, space.mesh, space.axes)
        )

        def held(value: Value) -> Held:
            new = found.values[value]
            return Held(new.layout or Layout(), frozenset(found.made.get(new, ())))

        outputs = tuple(map(held, piece.outputs))
        return Outcome(
            cost, tuple(map(held, piece.inputs)), outputs, tuple(layout for _, layout in kept), (False,) * len(outputs)
        )

    def kept_whole(self, outcome: Outcome) -> Iterator[Outcome]:
        """The outcome, and that with all outputs whole that were brought to be: what comes after may do better so."""
        yield outcome
        outputs = tuple(map(self.made_whole, outcome.outputs))
        kept = tuple(now != before for now, before in zip(outputs, outcome.outputs))
        if any(kept):
            yield replace(outcome, outputs=outputs, kept=kept)

    def made_whole(self, held: Held) -> Held:
        whole = Layout((axis, place) for axis, place in held.layout.items() if axis not in self.space.axes)
        return Held(whole, held.made - {whole}) if whole in held.made else held

    def only_cuts(self, readers: Sequence[Node]) -> list[Node]:
        """The readers of a parameter, if each makes the same part of it over the tensor axes."""
        places: set[tuple[Placement, ...]] = set()
        for node in readers:
            layout = node.outputs[0].layout if node.op == "planc.shard" and node.outputs[0] is not None else None
            places.add(tuple((layout or Layout())[axis] for axis in self.space.axes))
        same = len(places) == 1 and all(isinstance(place, Shard) for place in next(iter(places)))
        return list(readers) if same else []


def _in_style(options: Options, styles: Sequence[str], may_stay: bool) -> list[Layout]:
    """The layouts in these styles; whole, if there are none or it may stay so; else what there is."""
    found = [layout for style, layout in options if style in styles]
    if may_stay or not found:
        found += [layout for style, layout in options if style == "whole"]
    return found or [layout for _, layout in options]


def _over(layout: Layout, other: Layout | None) -> Layout:
    """The layout with what `other` says in its place."""
    return Layout({**layout, **other}) if other else layout
