"""What goes into a step and comes out of it: inputs, reported values, results, new buffers, and messages between stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from compiler.analysis.ranges import input_range
from compiler.autodiff.local import communicated_axes, cuts_text, shape_of
from compiler.dsl.plan import InputSpec
from compiler.ir.graph import Value
from compiler.layout.placement import Layout, Partial, Replicate, Shard, Varying
from compiler.link.calls import Slots
from compiler.link.kinds import Kind
from compiler.link.sources import Sources
from compiler.schedule.work import CallInfo
from runtime.mesh import TIME
from runtime.instructions import Instruction
from runtime.program import Buffer, Input, Message, Output, Result


def make_input(sources: Sources, spec: InputSpec) -> Input:
    captured, request = sources.captured, sources.request
    value = next((v for v in captured.graph.inputs if v.kind == "batch" and v.name == spec.name), None)
    if value is None:
        return Input(spec.name, spec.dtype, spec.shape, spec.batch_dim)
    found = input_range(captured.graph, value)
    layout = request.inputs.get(spec.name, Layout())
    cut = Value(spec.name, value.dtype, value.shape, layout=Layout({a: layout[a] for a in request.context_axes}))
    cuts = cuts_text(cut, sources.mesh)
    return Input(spec.name, value.dtype, value.shape, spec.batch_dim, found.below, found.ignore, cuts)


def make_outputs(sources: Sources, slots: Slots, infos: Sequence[CallInfo]) -> tuple[Output, ...]:
    """The scalars that a step reports. One rank of the pipeline has one, so all get it by the sum over the pipeline too."""
    found = []
    for role, value in sources.assigned.main.outputs.items():
        if role.startswith(("buffer:", "output:")):
            continue
        layout = value.layout or Layout()
        axes = tuple(
            axis
            for axis in sources.mesh.names
            if axis != TIME and (isinstance(layout[axis], Partial) or axis == sources.pipeline)
        )
        op = next((place.op for place in layout.values() if isinstance(place, Partial)), "sum")
        slot = slots[value]
        found.append(Output(role.removeprefix("metric:"), slot, axes, op, maker(slot, infos)))
    return tuple(found)


def make_results(sources: Sources, slots: Slots, infos: Sequence[CallInfo]) -> tuple[Result, ...]:
    """The tensors that a forward-only program gives."""
    found = []
    for role, value in sources.assigned.main.outputs.items():
        if not role.startswith("output:"):
            continue
        layout = value.layout or Layout()
        over = (*sources.request.batch_axes, TIME)
        dim = next((place.dim for axis in over if isinstance(place := layout[axis], Shard)), None)
        in_time = layout[TIME]
        op = in_time.op if isinstance(in_time, Partial) else ""
        cuts, slot = cuts_text(value, sources.mesh), slots[value]
        name, made = role.removeprefix("output:"), maker(slot, infos)
        found.append(Result(name, slot, value.dtype, value.shape, cuts, dim, op, made))
    return tuple(found)


def make_buffers(sources: Sources, slots: Slots, infos: Sequence[CallInfo]) -> tuple[Buffer, ...]:
    outputs = sources.assigned.main.outputs
    updates = {role.removeprefix("buffer:"): value for role, value in outputs.items() if role.startswith("buffer:")}
    found = []
    for name, info in sources.captured.buffers.items():
        slot, average, made = None, (), 0
        if (value := updates.get(name)) is not None:
            layout = value.layout or Layout()
            average = tuple(
                axis for axis, place in layout.items() if isinstance(place, Partial) and place.op == "avg"
            )
            slot = slots[value]
            made = maker(slot, infos)
        found.append(Buffer(name, tuple(info.shape), info.dtype, info.persistent, slot, average, made))
    return tuple(found)


def maker(slot: str, infos: Iterable[CallInfo]) -> int:
    """The pipeline stage that makes a slot."""
    return next(info.call.stages[0] for info in infos if slot in info.call.results)


def make_messages(
    sources: Sources, slots: Slots, instructions: Sequence[Sequence[Instruction]]
) -> tuple[Message, ...]:
    """The types of what stages send each other."""
    values = {slot: value for value, slot in slots.items()}
    sent = dict.fromkeys(i.target for stream in instructions for i in stream if i.op == "send")
    found = []
    for name in sent:
        value = values[name.removeprefix("d:")]
        shape = shape_of(value, sources.mesh)
        over = sliced_over(sources, value, name.startswith("d:"), shape)
        found.append(Message(name, value.dtype, shape, over))
    return tuple(found)


def sliced_over(sources: Sources, value: Value, gradient: bool, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The axes over which a message is sent in slices, if the plan says so: those of tensor parallelism over which all
    ranks have the same, if the slices come out even."""
    tensor, pipeline = sources.plan.tensor, sources.plan.pipeline
    if tensor is None or pipeline is None or not pipeline.scatter_gather:
        return ()
    layout = value.layout or Layout()
    same = (Replicate,) if gradient else (Replicate, Varying)
    axes = tuple(axis for axis in sources.mesh.parts(*tensor.axes) if isinstance(layout[axis], same))
    ways = math.prod(map(sources.mesh.size, axes))
    return axes if axes and math.prod(shape) % ways == 0 else ()


def communication_groups(kinds: Iterable[Kind], messages: Iterable[Message]) -> tuple[tuple[str, ...], ...]:
    """The sets of axes over which segments and messages communicate."""
    codes = [kind.recorded for kind in kinds]
    found = {communicated_axes(node) for code in codes for node in (*code.forward, *code.backward)}
    return tuple(sorted((found | {message.over for message in messages}) - {()}))
