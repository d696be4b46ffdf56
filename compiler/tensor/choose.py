"""`style = auto`: the cheapest cuts of what the plan leaves open.

Each weight may be cut in the ways that the operator which calculates with it has, or stay whole; `search.py` finds the
cheapest combination. What the plan names keeps its style. Parameters without a way of their own (biases, the weights
of normalisations) are stored as their one operator wants them.

A table that is looked up is cut along its vocabulary alone, as the head that it may be tied to: along its width it
would communicate half as much, but only once a step, and the two would no longer be alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from compiler.ir.graph import Graph, Value
from compiler.layout.placement import Layout, Mesh, Shard
from compiler.tensor.layouts import divided
from compiler.tensor.search import Space, cheapest
from compiler.tensor.uses import Way, ways


@dataclass(frozen=True)
class Surroundings:
    """What other strategies do: the layouts of the graph's inputs over the other axes, where they put activations (on a
    mesh whose tensor axes may be split), and methods of operators (`layout.propagate`)."""

    inputs: Mapping[str, Layout]
    placed: Callable[[Mesh], Mapping[Value, Layout]]
    methods: Mapping[str, str] = field(default_factory=dict)


def completed(
    graph: Graph,
    mesh: Mesh,
    axes: Sequence[str],
    named: Mapping[Value, str],
    dims: Mapping[Value, int],
    around: Surroundings,
) -> tuple[dict[Value, int], tuple[Value, ...]]:
    """The dimension along which each parameter is cut, and values to be kept whole over the axes. `named` and `dims`:
    what the plan's patterns say."""
    users = graph.users()
    parameters = [value for value in graph.inputs if value.kind == "param"]
    cuts = {value: open_ways(ways(value, users), mesh, axes, value) for value in parameters if value not in named}
    named_ways = {value: [Way(named[value], dim)] for value, dim in dims.items()}
    cuts = named_ways | {value: found for value, found in cuts.items() if found}
    result = divided(graph, mesh, axes, {value: [way.dim for way in found] for value, found in cuts.items()})
    options = {
        value: tuple((way.style, result.layouts[value, way.dim]) for way in found)
        + (() if value in named else (("whole", Layout()),))
        for value, found in cuts.items()
    }
    space = Space(
        graph,
        result.mesh,
        result.axes,
        {value: around.inputs.get(value.name, Layout()) for value in graph.inputs},
        options,
        frozenset(value for value in parameters if value not in options and value not in named),
        around.placed(result.mesh),
        around.methods,
    )
    found = cheapest(space, users)
    chosen: dict[Value, int] = {}
    for value, layout in found.layouts.items():
        own = Layout((axis, layout[axis]) for axis in result.axes)
        dims = [way.dim for way in cuts.get(value, ()) if result.layouts[value, way.dim] == own]
        if value not in cuts:
            dims = [place.dim for place in own.values() if isinstance(place, Shard)]
        chosen.update((value, dim) for dim in dims[:1])
    return chosen, found.whole


def open_ways(found: Sequence[Way], mesh: Mesh, axes: Sequence[str], value: Value) -> Sequence[Way]:
    """Those to choose from: of a table, its vocabulary."""
    styles = {way.style for way in found}
    return [way for way in found if way.style == "vocab"] if styles == {"vocab", "column"} else found
