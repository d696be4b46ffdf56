"""Requests: what a plan's strategies ask of capture and of layouts."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.capture import Captured, CaptureRequest
from compiler.context.layouts import context_axes, context_methods, entering_layouts, input_layouts
from compiler.diagnostics import Diagnostic
from compiler.dsl.plan import Plan
from compiler.ir.graph import Graph, Value
from compiler.layout.placement import Layout, Mesh, Placement, Shard, V
from compiler.passes.assign_layouts import LayoutRequest
from compiler.segments.split import units
from compiler.tensor.choose import Surroundings
from compiler.tensor.sequence import sequence_layouts
from compiler.tensor.styles import tensor_styles
from compiler.zero import hybrid_parts
from runtime.mesh import TIME


def plan_mesh(plan: Plan) -> Mesh:
    """The axes that divide work: those of more than one rank, and time innermost where the batch is cut in it."""
    axes = [(axis.name, axis.size) for axis in plan.mesh if axis.size > 1]
    if plan.microbatches > 1 or is_ragged(plan):
        axes.append((TIME, plan.microbatches))
    return Mesh(tuple(axes)).split(hybrid_parts(plan))


def is_ragged(plan: Plan) -> bool:
    """Whether some rows of a batch may not be real: at the end of an epoch, or where the batch does not divide."""
    tail = plan.data.tail if plan.data is not None else "pad"
    rows = batch_rows(plan)
    return rows is not None and (tail == "pad" or rows % batch_ways(plan) != 0)


def batch_rows(plan: Plan) -> int | None:
    """The rows of a batch that the plan asks for."""
    return next((spec.shape[spec.batch_dim] for spec in plan.inputs if spec.batch_dim is not None), None)


def batch_axes(plan: Plan) -> tuple[str, ...]:
    """The axes of more than one rank over which the batch is cut."""
    axes = plan.data.axes if plan.data is not None else ()
    return tuple(axis.name for axis in plan.mesh if axis.name in axes and axis.size > 1)


def batch_ways(plan: Plan) -> int:
    ways = plan.microbatches
    for axis in batch_axes(plan):
        ways *= plan.axis_size(axis)
    return ways


def capture_request(plan: Plan, widen: bool = False) -> CaptureRequest:
    """What to capture: the model at the batch size rounded up to what divides evenly; `widen`: in float64."""
    dtype = "float64" if widen else None
    return CaptureRequest.from_plan(plan, batch_ways(plan), dtype, check_rows=is_ragged(plan))


def layout_request(plan: Plan, graph: Graph, captured: Captured, warnings: list[Diagnostic]) -> LayoutRequest:
    """Batch inputs are cut over the data axes and time, their sequences over the context axes; parameters are used
    there in work that differs, and cut over the tensor axes. The request's mesh is that of the strategies, which may
    split axes of the plan into sub-axes."""
    mesh, context, methods = plan_mesh(plan), context_axes(plan), context_methods(plan)
    split = mesh.parts(*batch_axes(plan))
    over = (*split, *((TIME,) if TIME in mesh.names else ()))
    dims = {spec.name: spec.batch_dim for spec in plan.inputs}
    layouts: dict[str, Layout] = {}
    for value in graph.inputs:
        if value.kind == "batch" and (dim := dims[value.name]) is not None:
            layouts[value.name] = Layout((axis, Shard(dim)) for axis in over)
        elif value.kind == "param" and value.differentiable:
            layouts[value.name] = Layout((axis, V) for axis in (*over, *context))
    sequences = input_layouts(plan)
    for name, layout in sequences.items():
        layouts[name] = Layout({**layouts.get(name, Layout()), **layout})
    layers = units(captured.lists, captured.modules, plan.segments)

    def placed(mesh: Mesh) -> dict[Value, Layout]:
        """Activations that a strategy puts somewhere, on the mesh with these sub-axes."""
        found = dict(entering_layouts(plan, graph, layers, sequences))
        for value, layout in sequence_layouts(plan, graph, layers, mesh).items():
            found[value] = Layout({**found.get(value, Layout()), **layout})
        return found

    styles = tensor_styles(plan, graph, mesh, Surroundings(layouts, placed, methods))
    warnings += styles.warnings
    for name, layout in styles.layouts.items():
        layouts[name] = Layout({**layouts.get(name, Layout()), **layout})
    time = TIME if TIME in mesh.names else None
    rows = next((v.shape[d] for v in graph.inputs if v.kind == "batch" and (d := dims[v.name]) is not None), 0)
    puts: dict[Value, Mapping[str, Placement]] = {**styles.whole}
    for value, layout in placed(styles.mesh).items():
        puts[value] = {**puts.get(value, {}), **layout}
    return LayoutRequest(
        styles.mesh, split, layouts, time, rows if is_ragged(plan) else 0, puts, context, methods
    )
