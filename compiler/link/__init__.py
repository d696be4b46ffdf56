"""link: from graphs with layouts to a program. Cut into segments, differentiate each distinct one once, name what
flows between the calls, put them on pipeline stages, form buckets, and write the instruction streams."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.analysis.machine import machine
from compiler.link.calls import cut, make_calls, make_prologue, name_slots
from compiler.link.kinds import Kind, Kinds
from compiler.link.parameters import bytes_held, form_buckets, make_parameters
from compiler.link.program import make_program
from compiler.link.sources import Sources
from compiler.pipeline.staging import Staging, stage
from compiler.segments.split import Segment
from runtime.program import Program

__all__ = ["Kind", "Linked", "Sources", "link"]


@dataclass
class Linked:
    """The program and what it was made from."""

    program: Program
    kinds: dict[str, Kind]
    segments: list[Segment]
    prologue: Segment | None
    staging: Staging


def link(sources: Sources) -> Linked:
    """The program of a plan whose graphs have layouts. Raises PlanError for stages that cannot be."""
    plan, kinds, segments = sources.plan, Kinds(sources), cut(sources)
    slots = name_slots(segments)
    infos = make_calls(sources, segments, slots, kinds)
    reported = frozenset(slots[value] for value in sources.assigned.main.outputs.values())
    weights = bytes_held(sources, infos)
    staging = stage(plan, infos, segments, kinds.by_name, weights, machine(plan, sources.mesh), reported)
    infos = [replace(info, call=replace(info.call, stages=staging.of(info.call.name))) for info in infos]
    prologue_segment, prologue = make_prologue(sources, slots, kinds)
    parameters = make_parameters(sources, infos, staging)
    buckets = form_buckets(sources, infos, parameters)
    program = make_program(sources, kinds, slots, infos, staging, prologue, parameters, buckets)
    return Linked(program, kinds.by_name, segments, prologue_segment, staging)
