"""assign_layouts: layouts for the whole model, and the prologue that is computed once a step.

Micro-batches are an axis in time. What would have to be communicated along it and depends on the batch alone (the
number of valid labels, a mask that mixes samples) is *hoisted* into the prologue, which sees the whole local batch
before the first micro-batch.

    before:  %n : float32[] = aten.sum.default(%valid)               # labels of all micro-batches
             %loss : float32[] = aten.div.Tensor(%total, %n)
    after:   graph prologue { … %n.1 : float32[] {} = planc.all_reduce(%n, ['dp', 'micro'], 'sum')  output n = %n.1 }
             graph main { input %n : float32[] {}  # kind=hoisted
                          %loss : float32[] {dp: P, micro: P} = aten.div.Tensor(%total, %n) }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compiler.ir.graph import Graph, Node, Origin, Value, map_values
from compiler.layout.placement import Layout, Mesh, P, Partial, Placement, R, Shard, V, shard_axes
from compiler.layout.propagate import NeedsHoist, Propagation, TimeMixing, propagate
from compiler.layout.redistribute import Redistributor, held_cut


@dataclass(frozen=True)
class LayoutRequest:
    """The mesh (with the time axis innermost, if any), the axes that split the batch, and layouts of the inputs.

    `rows`: the rows of a batch, if only the first of them may be real; 0 where all always are. `placed`: values that a
    strategy puts somewhere, whatever their operands say. `context_axes` split the sequence, and `methods` says how an
    operator that has several ways to deal with it does so there.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    inputs: Mapping[str, Layout]
    time_axis: str | None = None
    rows: int = 0
    placed: Mapping[Value, Mapping[str, Placement]] = field(default_factory=dict)
    context_axes: tuple[str, ...] = ()
    methods: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Assigned:
    """Graphs with layouts. `full_batches`: something needs every row of the batch to be real."""

    main: Graph
    prologue: Graph | None
    fallbacks: list[Node]
    full_batches: list[Node]


def assign_layouts(graph: Graph, request: LayoutRequest) -> Assigned:
    """Propagate layouts, hoisting until nothing is communicated along time. Raises TimeMixing where that fails."""
    batch_only = batch_only_values(graph)
    hoisted: dict[Value, None] = dict.fromkeys(_early_hoists(graph, request, batch_only))
    while True:
        prologue = _prologue(graph, list(hoisted), request) if hoisted else None
        main, source_inputs, now = _main(graph, hoisted)
        placed = {now.get(value, value): layout for value, layout in request.placed.items()}
        layouts = {value: request.inputs.get(value.name, Layout()) for value in graph.inputs}
        if prologue is not None:
            layouts |= {v: prologue.outputs[v.name].layout or Layout() for v in source_inputs}
        source = {new: old for old, new in now.items()}  # `main` may be a copy; what is hoisted is of `graph`

        def hoistable(value: Value) -> bool:
            return source.get(value, value) in batch_only

        try:
            found = propagate(
                main, request.mesh, layouts, request.time_axis, request.rows, hoistable, placed, request.methods
            )
        except NeedsHoist as more:
            hoisted |= dict.fromkeys(source.get(value, value) for value in more.values)
            continue
        finish_outputs(found, request)
        found.graph.remove_dead()
        nodes = [*(prologue.nodes if prologue else ()), *found.graph.nodes]
        full = [n for n in nodes if _joins_rows(n, request)]
        return Assigned(found.graph, prologue, found.fallbacks, full)


def batch_only_values(graph: Graph) -> set[Value]:
    """Values that depend on the batch and constants alone, not on parameters or on buffers that change."""
    changing = {role.removeprefix("buffer:") for role in graph.outputs if role.startswith("buffer:")}
    found = {
        value
        for value in graph.inputs
        if value.kind in ("batch", "constant") or value.kind == "buffer" and value.name not in changing
    }
    for node in graph.nodes:
        if all(value in found for value in node.inputs):
            found.update(out for out in node.outputs if out is not None)
    return found


def _early_hoists(graph: Graph, request: LayoutRequest, batch_only: set[Value]) -> list[Value]:
    """Sums over the batch that depend on it alone: sure to be hoisted, so found before the large sweep."""
    if request.time_axis is None or request.mesh.size(request.time_axis) == 1:
        return []
    small = Graph("batch_only", [v for v in graph.inputs if v in batch_only])
    small.nodes = [n for n in graph.nodes if all(v in batch_only for v in n.inputs)]
    layouts = {v: request.inputs.get(v.name, Layout()) for v in small.inputs}
    try:
        found = propagate(
            small, request.mesh, layouts, request.time_axis, request.rows, lambda value: True, {}, request.methods
        )
    except NeedsHoist as more:
        return list(more.values)
    return [old for old, new in found.values.items() if isinstance(new.layout[request.time_axis], Partial)]


def _prologue(graph: Graph, hoisted: list[Value], request: LayoutRequest) -> Graph:
    """The graph that makes the hoisted values from the whole local batch: along time nothing is split there."""
    once = Graph("prologue", list(graph.inputs), list(graph.nodes), {hoisted_name(v): v for v in hoisted})
    once.remove_dead()
    used = {v for node in once.nodes for v in node.inputs} | set(hoisted)
    once.inputs = [v for v in once.inputs if v in used]
    assert request.time_axis is not None
    mesh = Mesh(tuple((axis, 1 if axis == request.time_axis else size) for axis, size in request.mesh.axes))
    layouts = {v: request.inputs.get(v.name, Layout()) for v in once.inputs}
    found = propagate(once, mesh, layouts, request.time_axis, request.rows, methods=request.methods)
    moves = Redistributor(found.graph, mesh)
    moves.main = list(found.graph.nodes)
    for role, value in found.graph.outputs.items():
        # Parts of the batch stay apart; sums are completed; along time everything is whole.
        places = {a: p if isinstance(p, Shard) and a != request.time_axis else R for a, p in value.layout.items()}
        found.graph.outputs[role] = moves.to(value, Layout(places), Origin())
    found.graph.nodes = moves.ordered()
    return found.graph


def hoisted_name(value: Value) -> str:
    """An input whose rows are needed all at once stays an input too, so the whole of it has a name of its own."""
    return value.name if value.producer is not None else f"{value.name}.whole"


def _main(graph: Graph, hoisted: Mapping[Value, None]) -> tuple[Graph, list[Value], dict[Value, Value]]:
    """The graph without what only the hoisted values need, these as inputs of it, and where each value went."""
    if not hoisted:
        return graph, [], {}
    stand_ins = {v: Value(hoisted_name(v), v.dtype, v.shape, "hoisted") for v in hoisted}
    main = Graph("main", list(graph.inputs), [], dict(graph.outputs))
    env: dict[Value, Value] = dict(stand_ins)
    for node in graph.nodes:
        if any(out in stand_ins for out in node.outputs):
            continue
        args, kwargs = map_values((node.args, node.kwargs), lambda value: env.get(value, value))
        copy = Node(node.op, args, kwargs, [], node.origin)
        for out in node.outputs:
            made = out and Value(out.name, out.dtype, out.shape, "", out.differentiable, producer=copy)
            copy.outputs.append(made)
            if out is not None and made is not None:
                env[out] = made
        main.nodes.append(copy)
    main.outputs = {role: env.get(value, value) for role, value in graph.outputs.items()}
    main.inputs += list(stand_ins.values())
    main.remove_dead()
    return main, list(stand_ins.values()), env


def finish_outputs(found: Propagation, request: LayoutRequest) -> None:
    """Bring the outputs where the runtime expects them: scalars as terms of a sum, buffers whole."""
    graph = found.graph
    moves = Redistributor(graph, request.mesh)
    moves.main = list(graph.nodes)
    split = (*request.batch_axes, *request.context_axes, *((request.time_axis,) if request.time_axis else ()))
    for role, value in graph.outputs.items():
        places: dict[str, Placement] = {}
        for axis in request.mesh.names:
            place = value.layout[axis]
            if role.startswith("output:"):
                # A part stays one; over micro-batches terms add up.
                places[axis] = place if isinstance(place, Shard) or axis == request.time_axis else R
            elif role.startswith("buffer:") or isinstance(place, Shard):
                keeps = isinstance(place, Partial) and place.op == "avg"
                places[axis] = place if keeps else R
            elif isinstance(place, Partial):
                places[axis] = place
            else:
                places[axis] = P if axis in split else R
        time = request.time_axis
        mixes = not role.startswith("output:") or isinstance(value.layout[time or ""], Partial)
        if mixes and time and request.mesh.size(time) > 1 and places.get(time, R) == R and value.layout[time] != R:
            assert value.producer is not None
            raise TimeMixing(value.producer, value)
        graph.outputs[role] = moves.to(value, Layout(places), Origin())
    graph.nodes = moves.ordered()


def _joins_rows(node: Node, request: LayoutRequest) -> bool:
    """Whether the node makes one whole of rows that may not all be real, puts several into one entry, or takes statistics
    of a part with such."""
    time = request.time_axis
    if not request.rows or time is None or not node.inputs:
        return False
    if any(out is not None and _holds_several_rows(out, time, request) for out in node.outputs):
        return True
    value, out = node.inputs[0], node.outputs[0]
    if not isinstance(value.layout[time], Shard):
        return False
    if "batch_norm" in node.op:
        return True
    # A count is made of shapes alone; `resolve_counts` makes it one of real rows.
    moves = node.op.startswith("planc.") and node.op != "planc.count"
    return moves and out is not None and out.layout[time] in (R, V)


def _holds_several_rows(value: Value, time: str, request: LayoutRequest) -> bool:
    """Whether what is cut into micro-batches are not whole numbers of entries for each row (pairs of samples)."""
    layout = value.layout or Layout()
    shard = layout[time]
    if not isinstance(shard, Shard):
        return False
    return held_cut(value, shard, shard_axes(layout, shard, request.mesh), request.mesh)[2] % request.rows != 0
