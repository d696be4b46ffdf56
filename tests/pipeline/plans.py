"""Plans with a pipeline: their calls as loads, before they are assigned to stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

from compiler.analysis.machine import Machine, machine
from compiler.driver import Compilation, compile
from compiler.dsl import loads as parse
from compiler.dsl.plan import Pattern, PipelineStrategy, Plan
from compiler.ir.graph import Graph
from compiler.layout.placement import Mesh
from compiler.pipeline.loads import Load, loads
from compiler.pipeline.split import Assignment, assign_stages
from compiler.pipeline.state import state_bytes
from compiler.schedule.actions import Pipeline
from compiler.schedule.planned import plan_schedule
from compiler.segments.constants import separate_constants
from compiler.segments.split import Segment, split
from tests.zoo import get, plan_text


@dataclass
class Case:
    plan: Plan
    compilation: Compilation
    loads: list[Load]
    state: dict[str, int]
    machine: Machine

    @property
    def schedule(self) -> Pipeline:
        return plan_schedule(self.plan)

    def assigned(self) -> Assignment:
        reported = frozenset(output.slot for output in self.compilation.program.outputs)
        return assign_stages(self.plan, self.loads, self.schedule, self.state, self.machine, reported)


@cache
def segmented(name: str, points: tuple[str, ...] = ()) -> Compilation:
    """Compiled on one rank, with segments as pipelines have them."""
    plan = parse(plan_text(get(name), batch=8, mesh="dp=1"), "pipeline.plan")
    strategy = PipelineStrategy(axes=("pp",), split_before=tuple(map(Pattern, points)))
    with constants_apart():
        return compile(replace(plan, pipeline=strategy))


@contextmanager
def constants_apart() -> Iterator[None]:
    def apart(graph: Graph, units: Sequence[str]) -> list[Segment]:
        return separate_constants(graph, split(graph, units))

    with mock.patch("compiler.link.split", apart):
        yield


def case(name: str, stages: int, pipeline: str = "", cluster: str = "") -> Case:
    """`name` of the zoo on `stages` ranks, with these options of `pipeline` and `cluster`."""
    text = plan_text(get(name), batch=8, mesh=f"pp={stages}", extra=f"pipeline over pp {{ {pipeline} }}\n{cluster}")
    plan = parse(text, "pipeline.plan")
    assert plan.pipeline is not None
    compilation = segmented(name, tuple(pattern.text for pattern in plan.pipeline.split_before))
    there = machine(plan, Mesh((("pp", stages),)))
    linked, main = compilation.linked, compilation.assigned.main
    trained = {p.name: p.trained for p in compilation.program.parameters}
    state = {v.name: state_bytes(plan, v, there.mesh, trained[v.name]) for v in main.inputs if v.kind == "param"}
    calls = loads(linked.segments, compilation.program.calls, linked.kinds, there)
    return Case(plan, compilation, calls, state, there)
