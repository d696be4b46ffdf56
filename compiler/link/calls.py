"""Calls: each segment as a use of its kind, with names for what flows between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compiler.ir.graph import Value
from compiler.layout.placement import Mesh
from compiler.link.kinds import Kinds
from compiler.link.sources import Sources
from compiler.schedule.work import CallInfo
from compiler.segments.canonical import first_site
from compiler.segments.constants import separate_constants
from compiler.segments.split import Segment, split, units
from runtime.mesh import TIME
from runtime.program import Call

Slots = Mapping[Value, str]
"""The names of what segments make for others: "layers.3/x"."""


def cut(sources: Sources) -> list[Segment]:
    """The segments of the main graph."""
    plan, captured, main = sources.plan, sources.captured, sources.assigned.main
    points = plan.pipeline.split_before if plan.pipeline is not None else ()
    segments = split(main, units(captured.lists, captured.modules, plan.segments, points))
    return separate_constants(main, segments) if sources.pipeline else segments


def name_slots(segments: Sequence[Segment]) -> Slots:
    return {value: f"{segment.name}/{value.name}" for segment in segments for value in segment.outputs}


def reference(value: Value, slots: Slots) -> str:
    """How a call names an argument."""
    prefix = {"param": "param", "buffer": "buffer", "batch": "batch", "constant": "const", "hoisted": "once"}
    return f"{prefix[value.kind]}:{value.name}" if value.kind else slots[value]


def make_calls(sources: Sources, segments: Sequence[Segment], slots: Slots, kinds: Kinds) -> list[CallInfo]:
    """From the last segment to the first, since which results have a gradient is known only backwards."""
    loss = sources.assigned.main.outputs.get("loss")
    has_gradient: set[Value] = {loss} if loss is not None and loss.differentiable else set()
    infos: list[CallInfo] = []
    for segment in reversed(segments):
        flags = tuple(value in has_gradient for value in segment.outputs)
        kind = kinds.of(segment, flags)
        wanted = [segment.inputs[k] for k in kind.code.wanted]
        has_gradient.update(wanted)
        call = Call(
            segment.name,
            kind.name,
            tuple(reference(value, slots) for value in segment.inputs),
            tuple(slots[value] for value in segment.outputs),
            tuple(reference(value, slots) for value in wanted),
            first_site(segment),
        )
        kind.calls.append(segment.name)
        weight = kind.split.weight if sources.pipeline else None
        again = tuple(weight.needed) if weight is not None and weight.nodes else None
        late = tuple(weight.wanted) if weight is not None else ()
        infos.append(CallInfo(call, tuple(kind.code.needed), bool(wanted), late, again))
    for kind in kinds.by_name.values():
        kind.calls.reverse()
    return infos[::-1]


def make_prologue(sources: Sources, slots: Slots, kinds: Kinds) -> tuple[Segment | None, Call | None]:
    """What is computed once a step, before the first micro-batch; along time nothing is cut there."""
    graph = sources.assigned.prologue
    if graph is None:
        return None, None
    segment = Segment("prologue", "prologue", graph.nodes, list(graph.inputs), list(graph.outputs.values()))
    mesh = Mesh(tuple((axis, 1 if axis == TIME else size) for axis, size in sources.mesh.axes))
    kind = kinds.of(segment, (False,) * len(segment.outputs), mesh)
    kind.calls.append("prologue")
    arguments = tuple(reference(value, slots) for value in segment.inputs)
    results = tuple(f"once:{role}" for role in graph.outputs)
    return segment, Call("prologue", kind.name, arguments, results, (), first_site(segment))
