"""compile: from a plan to a program folder. The stages in order, each a function of its own module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compiler.analysis.streams import verify_streams
from compiler.capture import Captured, capture
from compiler.clock import Clock
from compiler.diagnostics import Diagnostic
from compiler.dsl import load
from compiler.dsl.plan import Plan
from compiler.emit.folder import write_folder
from compiler.fit import Fitted, fit
from compiler.ir.graph import Graph
from compiler.ir.verify import verify_graph
from compiler.layout.placement import Mesh
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
from compiler.report.patterns import without_effect
from compiler.requests import batch_rows, batch_ways, capture_request, layout_request
from compiler.support import check_decays, check_parts, check_rows, explain_lowering, explain_time_mixing
from compiler.tensor.topology import across_nodes
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
    clock = Clock()
    warnings = [*plan.warnings]
    with clock("capture"):
        captured = capture(capture_request(plan, options.widen))
        warnings += check_decays(plan, captured.parameters)
        check_rows(plan, batch_rows(plan), batch_ways(plan), captured.counts_rows)
    warnings += check_parts(plan, batch_rows(plan), batch_ways(plan))
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
            raise explain_time_mixing(plan, mixing, graph, captured.modules) from None
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
    warnings += without_effect(result)
    return result


def _after_layouts(assigned: Assigned, request: LayoutRequest, watch: Watch | None) -> None:
    passes = [ResolveCounts(request.time_axis, request.rows), LiftVary()]
    for graph in filter(None, (assigned.prologue, assigned.main)):
        verify_graph(graph, "assign_layouts")
        if watch:
            watch("assign_layouts", graph)
        run_passes(graph, passes, facts={"layouts"}, watch=watch)
