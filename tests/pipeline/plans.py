"""Compiled pipelines."""

from __future__ import annotations

from functools import cache

from compiler.analysis.machine import machine
from compiler.driver import Compilation, compile
from compiler.dsl import loads as parse
from compiler.pipeline.loads import Load, loads
from compiler.pipeline.split import Assignment
from compiler.schedule.actions import Pipeline
from tests.zoo import get, plan_text

GPU = "cluster { device = h100 }"


@cache
def compiled(name: str, ranks: int, pipeline: str = "", extra: str = "") -> Compilation:
    """`name` of the zoo on `ranks` pipeline ranks, with these options of `pipeline`."""
    text = plan_text(get(name), batch=8, mesh=f"pp={ranks}", extra=f"pipeline over pp {{ {pipeline} }}\n{extra}")
    return compile(parse(text, "pipeline.plan"))


def assignment(c: Compilation) -> Assignment:
    found = c.linked.staging.assignment
    assert found is not None
    return found


def schedule(c: Compilation) -> Pipeline:
    found = c.linked.staging.schedule
    assert found is not None
    return found


def placed(c: Compilation) -> tuple[list[Load], dict[str, Load]]:
    """The calls that have one stage each, in their order, and those that are replicated."""
    replicated = assignment(c).replicated
    found = loads(c.linked.segments, c.program.calls, c.linked.kinds, machine(c.plan, c.mesh))
    return [load for load in found if load.name not in replicated], {l.name: l for l in found if l.name in replicated}
