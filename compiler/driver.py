"""compile: from a plan to a program folder. The stages in order, each a function of its own module."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from compiler.analysis.streams import verify_streams
from compiler.capture import Captured, CaptureRequest, capture
from compiler.context.layouts import context_axes, context_methods, entering_layouts, input_layouts
from compiler.diagnostics import Diagnostic
from compiler.dsl import load
from compiler.dsl.plan import Plan
from compiler.emit.folder import write_folder
from compiler.fit import Fitted, fit
from compiler.ir.graph import Graph, Value
from compiler.ir.verify import verify_graph
from compiler.layout.placement import Layout, Mesh, Placement, Shard, V
from compiler.layout.propagate import TimeMixing
from compiler.link import Linked, Sources, link
from compiler.passes.assign_layouts import Assigned, LayoutRequest, assign_layouts
from compiler.passes.base import run_passes
from compiler.passes.lift_vary import LiftVary
from compiler.passes.lower_support import LoweringError
from compiler.passes.pipeline import lowering
from compiler.passes.resolve_counts import ResolveCounts
from compiler.pipeline.fits import memory_warnings
from compiler.precision import Precision
from compiler.report.asked import Asked, asked
from compiler.segments.split import units
from compiler.support import check_rows, check_supported, explain_lowering, explain_time_mixing
from compiler.tensor.choose import Surroundings
from compiler.tensor.sequence import sequence_layouts
from compiler.tensor.styles import tensor_styles
from compiler.tensor.topology import across_nodes
from compiler.zero import hybrid_parts
from runtime.context import TIME
from runtime.program import Program

Watch = Callable[[str, Graph], None]


@dataclass(frozen=True)
class Options:
    """How to compile. `widen`: everything in float64, for verification. `watch` sees the graph after every pass."""

    widen: bool = False
    watch: Watch | None = None


@dataclass
class Compilation:
    """A compiled plan: the program, the graphs at every level, what was done about each request, and how long it took.

    `mesh` has the axes that divide work, split into sub-axes where a strategy needs them. `seconds` maps a stage's name to
    its time. `fitted` is what `recompute … = fit(…)` chose.
    """

    plan: Plan
    program: Program
    captured: Captured
    lowered: Graph
    mesh: Mesh
    assigned: Assigned
    linked: Linked
    asked: list[Asked]
    warnings: list[Diagnostic]
    seconds: dict[str, float] = field(default_factory=dict)
    fitted: Fitted | None = None

    def write(self, folder: str | Path) -> Path:
        """Write the program folder (replacing an older one there) and return it."""
        return write_folder(self, Path(folder))


def compile(plan: str | Path | Plan, sets: Sequence[str] = (), options: Options = Options()) -> Compilation:
    """Compile a plan, given as a path or already loaded.

    Raises PlanError with every diagnostic that could be found.
    """
    if not isinstance(plan, Plan):
        plan = load(str(plan), sets)
    clock = _Clock()
    warnings = [*plan.warnings, *check_supported(plan)]
    with clock("capture"):
        captured = capture(capture_request(plan, options))
        check_rows(plan, batch_rows(plan), batch_ways(plan), captured.counts_rows)
    with clock("lower"):
        graph = captured.graph
        verify_graph(graph, "capture")
        if options.watch:
            options.watch("capture", graph)
        try:
            graph = run_passes(graph, lowering(plan), watch=options.watch)
        except LoweringError as error:
            raise explain_lowering(plan, error) from None
    with clock("layouts"):
        request = layout_request(plan, graph, captured, warnings)
        try:
            assigned = assign_layouts(graph, request)
        except TimeMixing as mixing:
            raise explain_time_mixing(plan, mixing, captured.modules) from None
        joining = assigned.full_batches[0] if assigned.full_batches else None
        check_rows(plan, batch_rows(plan), batch_ways(plan), None, joining)
        _after_layouts(assigned, request, options.watch)

    def build(plan: Plan) -> Compilation:
        linked = link(Sources(plan, captured, assigned, request, Precision.of(plan, options.widen)))
        return Compilation(plan, linked.program, captured, graph, request.mesh, assigned, linked, [], warnings)

    with clock("fit"):
        settled, fitted = fit(plan, build, refuse=not options.widen)
    with clock("segments"):
        result = build(settled)
    with clock("verifier"):
        verify_streams(result.program, result.linked.kinds)
    warnings += memory_warnings(settled, result.linked.staging, request.mesh)
    result.plan, result.fitted, result.seconds = plan, fitted, clock.seconds
    warnings += across_nodes(plan, request.mesh, result.linked)
    result.asked = asked(result)
    return result


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


def capture_request(plan: Plan, options: Options) -> CaptureRequest:
    """What to capture: the model at the batch size rounded up to what divides evenly."""
    ways = batch_ways(plan)
    dtype = "float64" if options.widen else None
    return CaptureRequest.from_plan(plan, ways, dtype, check_rows=is_ragged(plan))


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


def _after_layouts(assigned: Assigned, request: LayoutRequest, watch: Watch | None) -> None:
    passes = [ResolveCounts(request.time_axis, request.rows), LiftVary()]
    for graph in filter(None, (assigned.prologue, assigned.main)):
        verify_graph(graph, "assign_layouts")
        if watch:
            watch("assign_layouts", graph)
        run_passes(graph, passes, facts={"layouts"}, watch=watch)


class _Clock:
    """Times stages, and keeps the garbage collector out of them: a full collection over the millions of objects that
    torch.export leaves costs more than a whole stage, and the stages make little garbage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start, collecting = time.perf_counter(), gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()
            self.seconds[stage] = time.perf_counter() - start
