"""The report of `planc inspect --html`: one file with everything, without scripts or references to other files."""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import jinja2

from compiler.analysis.estimate import Estimate, estimate
from compiler.analysis.explain import explain
from compiler.analysis.machine import Machine
from compiler.dsl.units import show_size
from compiler.report.asked import APPLIED, NOTHING, PARTLY
from compiler.report.charts import ACTIONS, OTHER_ACTION, WIDTH, memory_chart, rows
from compiler.report.estimate import grouped, memory_lines, time_lines
from compiler.report.explain import details, headline
from compiler.report.numbers import count, duration
from compiler.report.pictures import schedule_picture
from compiler.report.show import LEVELS, distinct_segments, level_text
from compiler.report.timeline import to_svg

if TYPE_CHECKING:
    from compiler.driver import Compilation


@cache
def _template() -> jinja2.Template:
    text = (files("compiler.report") / "templates" / "report.html.j2").read_text()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"size": show_size, "duration": duration}
    return environment.from_string(text)


def html_report(compilation: Compilation) -> str:
    """The page: summary, requests, memory, time, traffic and its reasons, graphs at every level, and the plan."""
    found = estimate(compilation)
    available = found.machine.device.memory
    stages = list(zip(found.runs, found.memory, found.time.stages))
    sent = max(found.traffic, key=lambda traffic: traffic.sent)
    reasons = [item for run in found.runs for item in explain(compilation, run)]
    return _template().render(
        program=compilation.program,
        figures=figures(compilation, found),
        asked=compilation.asked,
        outcomes={APPLIED: "good", PARTLY: "some", NOTHING: "dim"},
        memory=[(memory, memory_chart(run, memory, time, available)) for run, memory, time in stages],
        fullest=found.fullest.stage,
        memory_lines=memory_lines(found),
        available=available,
        timeline=rows(found.time),
        time_lines=time_lines(found),
        seconds=found.time.seconds,
        schedule=schedule_svg(compilation, found.machine),
        actions={**ACTIONS, "others": OTHER_ACTION},
        traffic=[(*key, *value) for key, value in grouped(sent).items()],
        most=max((size for _, size in grouped(sent).values()), default=1),
        reasons=[(headline(item, len(found.runs)), details(item)) for item in sorted(reasons, key=lambda item: -item.sent)],
        levels=[(level, text) for level in LEVELS if (text := level_text(compilation, level)).strip()],
        plan=compilation.plan.text,
        width=WIDTH,
    )


def figures(compilation: Compilation, found: Estimate) -> list[tuple[str, str]]:
    """The figures at the top of the page: what, and how much."""
    program = compilation.program
    mesh = " ".join(f"{axis}={size}" for axis, size in program.axes.items()) or "one device"
    return [
        ("mesh", mesh),
        ("device", f"{found.ranks} x {found.machine.device.name}"),
        ("parameters", count(sum(math.prod(p.shape) for p in program.parameters))),
        ("peak memory", f"{show_size(found.fullest.peak.bytes)} of {show_size(found.machine.device.memory)}"),
        ("step, at least", duration(found.time.seconds)),
        ("MFU, at most", f"{100 * found.mfu:.3g} %"),
        ("sent by a rank", show_size(max(traffic.sent for traffic in found.traffic))),
        ("segments", f"{len(program.calls)}, {distinct_segments(program)} distinct"),
        ("compiled in", duration(sum(compilation.seconds.values()))),
    ]


def schedule_svg(compilation: Compilation, device: Machine) -> str | None:
    """The pipeline's schedule, in units of one forward; that of `auto` in the times that it was made for."""
    strategy, staging = compilation.plan.pipeline, compilation.linked.staging
    if strategy is None or staging.schedule is None:
        return None
    costs = staging.costs(compilation.plan, device) if strategy.schedule == "auto" else None
    return to_svg(schedule_picture(strategy.schedule, staging.schedule, costs))
