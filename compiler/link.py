"""link: from graphs with layouts to a program. Cut into segments, differentiate each distinct one once, name what
flows between the calls, form buckets, and write the instruction stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from compiler.analysis.machine import machine
from compiler.analysis.ranges import input_range
from compiler.autodiff.local import communicated_axes, cuts_text, shape_of
from compiler.autodiff.partition import SegmentCode, partition
from compiler.autodiff.trace import trace
from compiler.autodiff.weight_split import SplitBackward, split_backward
from compiler.capture import Captured
from compiler.dsl.plan import InputSpec, Plan
from compiler.ir.graph import Graph, Value
from compiler.layout.placement import Layout, Mesh, Partial, Replicate, Shard, Varying
from compiler.overlap.segment import Overlap
from compiler.passes.assign_layouts import Assigned, LayoutRequest
from compiler.pipeline.staging import Staging, pipeline_axis, stage
from compiler.pipeline.state import state_bytes
from compiler.precision import Precision, Stored
from compiler.recompute import policy_for
from compiler.schedule.buckets import Alike, Member, make_buckets
from compiler.schedule.stream import StreamRequest, streams
from compiler.schedule.work import CallInfo
from compiler.segments.canonical import canonical, first_site, key
from compiler.segments.constants import separate_constants
from compiler.segments.split import Segment, split, units
from compiler.zero import sharding
from runtime.context import TIME
from runtime.instructions import Instruction
from runtime.program import Bucket, Buffer, Call, Input, Message, Output, Parameter, Program, Result


@dataclass
class Kind:
    """A distinct segment: its graph with neutral names, its code as it was recorded and as it runs, and the calls that use
    it."""

    name: str
    graph: Graph
    recorded: SegmentCode
    policy: str
    overlap: Overlap
    calls: list[str] = field(default_factory=list)

    @cached_property
    def code(self) -> SegmentCode:
        """The code that runs: its communication is behind its computation."""
        return self.overlap.code(self.recorded)

    @cached_property
    def split(self) -> SplitBackward:
        """The backward in two parts."""
        return self.overlap.split(split_backward(self.recorded), self.recorded)


@dataclass
class Linked:
    """The program and what it was made from."""

    program: Program
    kinds: dict[str, Kind]
    segments: list[Segment]
    prologue: Segment | None
    staging: Staging


def link(
    plan: Plan, captured: Captured, assigned: Assigned, request: LayoutRequest, precision: Precision = Precision()
) -> Linked:
    return _Linker(plan, captured, assigned, request, precision).link()


class _Linker:
    def __init__(
        self, plan: Plan, captured: Captured, assigned: Assigned, request: LayoutRequest, precision: Precision
    ):  # fmt: skip
        self.plan, self.captured, self.assigned, self.request = plan, captured, assigned, request
        self.precision = precision
        self.mesh = request.mesh
        self.overlap = Overlap.of(plan, request.mesh)
        self.kinds: dict[str, Kind] = {}
        self.by_key: dict[tuple[str, tuple[bool, ...], str], Kind] = {}
        self.slots: dict[Value, str] = {}
        self.zero = sharding(plan, self.mesh)
        self.pipeline = pipeline_axis(plan)

    def link(self) -> Linked:
        main = self.assigned.main
        points = self.plan.pipeline.split_before if self.plan.pipeline is not None else ()
        segments = split(main, units(self.captured.lists, self.captured.modules, self.plan.segments, points))
        if self.pipeline:
            segments = separate_constants(main, segments)
        for segment in segments:
            self.slots.update((value, f"{segment.name}/{value.name}") for value in segment.outputs)
        infos = self.calls(segments)
        staging = self.staging(infos, segments)
        infos = [replace(info, call=replace(info.call, stages=staging.of(info.call.name))) for info in infos]
        prologue_segment, prologue = self.prologue()
        parameters = self.parameters(infos, staging)
        buckets = self.buckets(infos, parameters)
        program = self.program(infos, staging, prologue, parameters, buckets)
        return Linked(program, self.kinds, segments, prologue_segment, staging)

    # -- calls ---------------------------------------------------------------------------------------------------

    def calls(self, segments: Sequence[Segment]) -> list[CallInfo]:
        """From the last segment to the first, since which results have a gradient is known only backwards."""
        loss = self.assigned.main.outputs.get("loss")
        has_gradient: set[Value] = {loss} if loss is not None and loss.differentiable else set()
        infos: list[CallInfo] = []
        for segment in reversed(segments):
            flags = tuple(value in has_gradient for value in segment.outputs)
            kind = self.kind(segment, flags)
            wanted = [segment.inputs[k] for k in kind.code.wanted]
            has_gradient.update(wanted)
            call = Call(
                segment.name,
                kind.name,
                tuple(self.reference(value) for value in segment.inputs),
                tuple(self.slots[value] for value in segment.outputs),
                tuple(self.reference(value) for value in wanted),
                first_site(segment),
            )
            kind.calls.append(segment.name)
            weight = kind.split.weight if self.pipeline else None
            again = tuple(weight.needed) if weight is not None and weight.nodes else None
            late = tuple(weight.wanted) if weight is not None else ()
            infos.append(CallInfo(call, tuple(kind.code.needed), bool(wanted), late, again))
        for kind in self.kinds.values():
            kind.calls.reverse()
        return infos[::-1]

    def kind(self, segment: Segment, flags: tuple[bool, ...], mesh: Mesh | None = None) -> Kind:
        graph = canonical(segment)
        policy = policy_for(self.plan, segment.unit)
        identity = (key(graph), flags, policy)
        if identity not in self.by_key:
            code = partition(trace(graph, mesh or self.mesh, flags), policy)
            name = self.kind_name(segment)
            graph.name = name
            self.by_key[identity] = self.kinds[name] = Kind(name, graph, code, policy, self.overlap)
        return self.by_key[identity]

    def kind_name(self, segment: Segment) -> str:
        """The unit's path without the element's number: "layers" for "layers.3"."""
        base = "_".join(part for part in segment.name.split(".") if not part.isdigit()) or "segment"
        base = "".join(c if c.isalnum() else "_" for c in base)
        name, k = base, 2
        while name in self.kinds:
            name, k = f"{base}_{k}", k + 1
        return name

    def reference(self, value: Value) -> str:
        prefix = {"param": "param", "buffer": "buffer", "batch": "batch", "constant": "const", "hoisted": "once"}
        return f"{prefix[value.kind]}:{value.name}" if value.kind else self.slots[value]

    def prologue(self) -> tuple[Segment | None, Call | None]:
        graph = self.assigned.prologue
        if graph is None:
            return None, None
        segment = Segment("prologue", "prologue", graph.nodes, list(graph.inputs), list(graph.outputs.values()))
        mesh = Mesh(tuple((axis, 1 if axis == TIME else size) for axis, size in self.mesh.axes))
        kind = self.kind(segment, (False,) * len(segment.outputs), mesh)
        kind.calls.append("prologue")
        arguments = tuple(self.reference(value) for value in segment.inputs)
        results = tuple(f"once:{role}" for role in graph.outputs)
        return segment, Call("prologue", kind.name, arguments, results, (), first_site(segment))

    # -- parameters ----------------------------------------------------------------------------------------------

    def staging(self, infos: Sequence[CallInfo], segments: Sequence[Segment]) -> Staging:
        values = (value for value in self.assigned.main.inputs if value.kind == "param")
        trained = {name for info in infos for name in info.trained}
        state = {
            value.name: state_bytes(self.plan, value, self.stored(value.name), self.mesh, value.name in trained)
            for value in values
        }
        reported = frozenset(self.slots[value] for value in self.assigned.main.outputs.values())
        return stage(self.plan, infos, segments, self.kinds, state, machine(self.plan, self.mesh), reported)

    def parameters(self, infos: Sequence[CallInfo], staging: Staging) -> tuple[Parameter, ...]:
        """All parameters; trained are those that a gradient reaches (the others have None in eager PyTorch too)."""
        trained = {name for info in infos for name in info.trained}
        values = {value.name: value for value in self.assigned.main.inputs if value.kind == "param"}
        ranks = staging.parameter_ranks(infos)
        found = []
        for name, info in self.captured.parameters.items():
            value = values.get(name)
            cuts = cuts_text(value, self.mesh) if value is not None else ""
            dtype = info.dtype if value is not None else info.own  # what nothing reads stays as it is
            found.append(Parameter(name, tuple(info.shape), dtype, name in trained, cuts, ranks.get(name, (0,))))
        return tuple(found)

    def buckets(self, infos: Sequence[CallInfo], parameters: Sequence[Parameter]) -> tuple[Bucket, ...]:
        """Of trained parameters, and of those that ZeRO cuts, in the order in which their gradients become final."""
        users: dict[str, list[str]] = {}
        for info in reversed(infos):
            for name in reversed(dict.fromkeys(info.parameters)):
                users.setdefault(name, []).append(info.call.name)
                users[name] = users.pop(name)  # a later use in this order makes the gradient final
        values = {value.name: value for value in self.assigned.main.inputs if value.kind == "param"}
        specs = {spec.name: spec for spec in parameters}
        members = []
        for name, calls in users.items():
            value, spec = values[name], specs[name]
            shard = self.zero.of(value, spec.trained)
            if not (spec.trained or shard):
                continue
            axes = self.reduce_axes(value, len(spec.stages) > 1) if spec.trained else ()
            zero = self.zero.stage if shard else 0
            offload = self.zero.offload if shard else "none"
            alike = Alike(spec.dtype, axes, shard, zero, spec.trained, spec.stages, *self.other_dtypes(spec), offload)
            members.append(Member(name, shape_of(value, self.mesh), alike, tuple(reversed(calls))))
        return make_buckets(members, self.bucket_size, self.decays)

    def other_dtypes(self, spec: Parameter) -> tuple[str, str]:
        """Of a parameter's gradient and of its master, empty where it is the parameter's own."""
        if not spec.trained:
            return "", ""
        stored = self.stored(spec.name)
        return "" if stored.reduce == spec.dtype else stored.reduce, stored.master or ""

    def stored(self, name: str) -> Stored:
        """The dtypes of a trained parameter."""
        return self.precision.stored(self.captured.parameters[name].own)

    @property
    def bucket_size(self) -> int:
        strategy = self.plan.zero if self.zero.stage else self.plan.data
        return strategy.bucket if strategy is not None else 25_000_000

    def reduce_axes(self, value: Value, across_stages: bool) -> tuple[str, ...]:
        """The axes over which a parameter's gradient is a partial sum: also the pipeline's, if several stages use it."""
        layout = value.layout or Layout()
        return tuple(
            axis
            for axis, size in self.mesh.axes
            if axis != TIME and size > 1 and (isinstance(layout[axis], Varying) or across_stages and axis == self.pipeline)
        )

    def decays(self, name: str) -> bool:
        """Whether the optimizer decays a parameter; the last of the plan's patterns to say so is `no_decay`."""
        spec = self.plan.optimizer
        if spec is None:
            return True
        if any(p.matches(name) for p in spec.no_decay):
            return False
        return not spec.decay or any(p.matches(name) for p in spec.decay)

    # -- the program ---------------------------------------------------------------------------------------------

    def program(
        self, infos: Sequence[CallInfo], staging: Staging, prologue: Call | None, parameters: tuple[Parameter, ...],
        buckets: tuple[Bucket, ...],
    ) -> Program:  # fmt: skip
        plan, main = self.plan, self.assigned.main
        outputs = tuple(
            self.output(role, value, infos)
            for role, value in main.outputs.items()
            if not role.startswith(("buffer:", "output:"))
        )
        results = tuple(self.result(role, value) for role, value in main.outputs.items() if role.startswith("output:"))
        buffers = self.buffers(infos)
        kept = {item.slot for item in (*outputs, *results)} | {b.update for b in buffers if b.update is not None}
        trains = plan.mode == "train"
        clip = {k: v for k, v in vars(plan.clip).items() if k.startswith("grad_") and v is not None} if plan.clip else {}
        requests = [
            StreamRequest(
                tuple(bucket for bucket in buckets if rank in bucket.stages),
                has_prologue=any("once:" in ref for item in work for ref in item.info.call.arguments),
                finite=self.precision.loss_scale is not None,
                clip=bool(clip) and trains,
                optimizer=plan.optimizer is not None and trains,
                updates=any(b.update and b.stage == rank for b in buffers),
                kept=kept,
                prefetch=self.zero.prefetch,
                gather_once=self.zero.gather_once,
                scatter=self.zero.scatter,
            )
            for rank, work in enumerate(staging.work)
        ]
        instructions = streams(staging.work, requests)
        messages = self.messages(instructions)
        rows = next((s.shape[s.batch_dim] for s in plan.inputs if s.batch_dim is not None), 1)
        inputs = tuple(self.input(spec) for spec in plan.inputs)
        batch = next((i.shape[i.batch_dim] for i in inputs if i.batch_dim is not None), 1)
        optimizer = plan.optimizer
        return Program(
            name=_stem(plan.path),
            mesh=dict(self.whole_mesh().axes),
            microbatches=plan.microbatches,
            batch=batch,
            rows=rows,
            ragged=self.request.rows > 0 and not self.needs_full_batches,
            full_batches=self.needs_full_batches,
            batch_axes=self.request.batch_axes,
            model={
                "factory": plan.model.factory,
                "options": dict(plan.model.options),
                "base": str(plan.model.folder.resolve()),
            },
            inputs=inputs,
            parameters=parameters,
            ties=dict(self.captured.ties),
            buffers=buffers,
            constants=tuple(self.captured.constants),
            outputs=outputs,
            kinds={name: f"segments/{name}.py" for name in self.kinds},
            prologue=prologue,
            calls=tuple(info.call for info in infos),
            buckets=buckets,
            optimizer=None
            if optimizer is None or not trains
            else {
                "name": optimizer.name,
                **{k: list(v) if isinstance(v, tuple) else v for k, v in optimizer.options.items()},
                "schedule": optimizer.schedule,
                "warmup": optimizer.warmup,
                "total": optimizer.total,
                "min_lr": optimizer.min_lr,
            },
            loss_scale=self.precision.loss_scale,
            clip=clip or None,
            opaque=tuple(dict.fromkeys(node.args[0] for node in main.nodes if node.op == "planc.opaque")),
            train={k: v for k, v in vars(plan.train).items() if k not in ("span", "given")}
            | {"tail": plan.data.tail if plan.data is not None else "pad"},
            mode=plan.mode,
            results=results,
            groups=self.groups(messages),
            streams=instructions,
            pipeline=self.pipeline,
            messages=messages,
        )

    def messages(self, instructions: Sequence[Sequence[Instruction]]) -> tuple[Message, ...]:
        """The types of what stages send each other."""
        values = {slot: value for value, slot in self.slots.items()}
        sent = dict.fromkeys(i.target for stream in instructions for i in stream if i.op == "send")
        found = []
        for name in sent:
            value = values[name.removeprefix("d:")]
            shape = shape_of(value, self.mesh)
            found.append(Message(name, value.dtype, shape, self.sliced_over(value, name.startswith("d:"), shape)))
        return tuple(found)

    def sliced_over(self, value: Value, gradient: bool, shape: tuple[int, ...]) -> tuple[str, ...]:
        """The axes over which a message is sent in slices, if the plan says so: those of tensor parallelism over which all
        ranks have the same, if the slices come out even."""
        tensor, pipeline = self.plan.tensor, self.plan.pipeline
        if tensor is None or pipeline is None or not pipeline.scatter_gather:
            return ()
        layout = value.layout or Layout()
        same = (Replicate,) if gradient else (Replicate, Varying)
        axes = tuple(axis for axis in self.mesh.parts(*tensor.axes) if isinstance(layout[axis], same))
        ways = math.prod(map(self.mesh.size, axes))
        return axes if axes and math.prod(shape) % ways == 0 else ()

    def groups(self, messages: Sequence[Message]) -> tuple[tuple[str, ...], ...]:
        """The sets of axes over which segments communicate."""
        codes = [kind.recorded for kind in self.kinds.values()]
        found = {communicated_axes(node) for code in codes for node in (*code.forward, *code.backward)}
        sliced = {message.over for message in messages}
        return tuple(sorted((found | sliced) - {()}))

    def whole_mesh(self) -> Mesh:
        """The plan's mesh, its axes of one rank included, split into sub-axes as the layouts have it."""
        sizes = {axis.name: tuple(map(self.mesh.size, self.mesh.parts(axis.name))) for axis in self.plan.mesh}
        return Mesh(tuple((axis.name, axis.size) for axis in self.plan.mesh)).split(sizes)

    def input(self, spec: InputSpec) -> Input:
        value = next((v for v in self.captured.graph.inputs if v.kind == "batch" and v.name == spec.name), None)
        if value is None:
            return Input(spec.name, spec.dtype, spec.shape, spec.batch_dim)
        found = input_range(self.captured.graph, value)
        layout = self.request.inputs.get(spec.name, Layout())
        cut = Value(spec.name, value.dtype, value.shape, layout=Layout({a: layout[a] for a in self.request.context_axes}))
        return Input(
            spec.name, value.dtype, value.shape, spec.batch_dim, found.below, found.ignore, cuts_text(cut, self.mesh)
        )

    @property
    def needs_full_batches(self) -> bool:
        """Whether every row of a batch must be real: something joins the rows, or calculates with their number."""
        return bool(self.assigned.full_batches) or self.captured.counts_rows is not None

    def output(self, role: str, value: Value, infos: Sequence[CallInfo]) -> Output:
        """One rank of the pipeline has it, so all get it by the sum over the pipeline too."""
        layout = value.layout or Layout()
        axes = tuple(
            axis
            for axis in self.mesh.names
            if axis != TIME and (isinstance(layout[axis], Partial) or axis == self.pipeline)
        )
        op = next((place.op for place in layout.values() if isinstance(place, Partial)), "sum")
        slot = self.slots[value]
        return Output(role.removeprefix("metric:"), slot, axes, op, self.maker(slot, infos))

    def result(self, role: str, value: Value) -> Result:
        rows = {place.dim for axis in (*self.request.batch_axes, TIME) if isinstance(place := value.layout[axis], Shard)}
        dim = next(iter(rows), None)
        over = value.layout[TIME] if value.layout else None
        op = over.op if isinstance(over, Partial) else ""
        return Result(role.removeprefix("output:"), self.slots[value], value.shape, cuts_text(value, self.mesh), dim, op)

    @staticmethod
    def maker(slot: str, infos: Sequence[CallInfo]) -> int:
        """The pipeline stage that makes a slot."""
        return next(info.call.stages[0] for info in infos if slot in info.call.results)

    def buffers(self, infos: Sequence[CallInfo]) -> tuple[Buffer, ...]:
        updates = {
            role.removeprefix("buffer:"): value
            for role, value in self.assigned.main.outputs.items()
            if role.startswith("buffer:")
        }
        found = []
        for name, info in self.captured.buffers.items():
            value = updates.get(name)
            average = tuple(
                axis for axis, place in (value.layout or {}).items() if isinstance(place, Partial) and place.op == "avg"
            ) if value is not None else ()  # fmt: skip
            slot = self.slots[value] if value is not None else None
            made = self.maker(slot, infos) if slot is not None else 0
            found.append(Buffer(name, tuple(info.shape), info.dtype, info.persistent, slot, average, made))
        return tuple(found)


def _stem(path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    return name.removesuffix(".plan") or "plan"
