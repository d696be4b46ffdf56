"""The program: everything that linking found, and the instruction streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compiler.dsl.plan import Plan
from compiler.layout.placement import Mesh
from compiler.link.calls import Slots
from compiler.link.ends import (
    communication_groups,
    make_buffers,
    make_input,
    make_messages,
    make_outputs,
    make_results,
)
from compiler.link.kinds import Kinds
from compiler.link.sources import Sources
from compiler.pipeline.staging import Staging
from compiler.schedule.stream import StreamRequest, streams
from compiler.schedule.work import CallInfo
from runtime.program import Bucket, Buffer, Call, Parameter, Program


def make_program(
    sources: Sources, kinds: Kinds, slots: Slots, infos: Sequence[CallInfo], staging: Staging, prologue: Call | None,
    parameters: tuple[Parameter, ...], buckets: tuple[Bucket, ...],
) -> Program:  # fmt: skip
    plan, main = sources.plan, sources.assigned.main
    outputs, results = make_outputs(sources, slots, infos), make_results(sources, slots, infos)
    buffers = make_buffers(sources, slots, infos)
    kept = {item.slot for item in (*outputs, *results)}
    instructions = streams(staging.work, stream_requests(sources, staging, buckets, buffers, kept))
    messages = make_messages(sources, slots, instructions)
    inputs = tuple(make_input(sources, spec) for spec in plan.inputs)
    full_batches = bool(sources.assigned.full_batches) or sources.captured.counts_rows is not None
    return Program(
        name=stem(plan.path),
        mesh=dict(whole_mesh(sources).axes),
        microbatches=plan.microbatches,
        batch=next((i.shape[i.batch_dim] for i in inputs if i.batch_dim is not None), 1),
        rows=next((s.shape[s.batch_dim] for s in plan.inputs if s.batch_dim is not None), 1),
        ragged=sources.request.rows > 0 and not full_batches,
        full_batches=full_batches,
        batch_axes=sources.request.batch_axes,
        model={
            "factory": plan.model.factory,
            "options": dict(plan.model.options),
            "base": str(plan.model.folder.resolve()),
        },
        inputs=inputs,
        parameters=parameters,
        ties=dict(sources.captured.ties),
        buffers=buffers,
        constants=tuple(sources.captured.constants),
        outputs=outputs,
        kinds={name: f"segments/{name}.py" for name in kinds.by_name},
        prologue=prologue,
        calls=tuple(info.call for info in infos),
        buckets=buckets,
        optimizer=optimizer_options(plan) if sources.trains else None,
        loss_scale=sources.precision.loss_scale,
        clip=clip_limits(plan) or None,
        opaque=tuple(dict.fromkeys(node.args[0] for node in main.nodes if node.op == "planc.opaque")),
        train={k: v for k, v in vars(plan.train).items() if k not in ("span", "given")}
        | {"tail": plan.data.tail if plan.data is not None else "pad"},
        mode=plan.mode,
        results=results,
        groups=communication_groups(kinds.by_name.values(), messages),
        streams=instructions,
        pipeline=sources.pipeline,
        messages=messages,
    )


def stream_requests(
    sources: Sources, staging: Staging, buckets: Sequence[Bucket], buffers: Sequence[Buffer], kept: set[str]
) -> list[StreamRequest]:
    """What the stream of each pipeline rank is made with."""
    plan, zero = sources.plan, sources.zero
    kept = kept | {buffer.update for buffer in buffers if buffer.update is not None}
    return [
        StreamRequest(
            tuple(bucket for bucket in buckets if rank in bucket.stages),
            has_prologue=any("once:" in ref for item in work for ref in item.info.call.arguments),
            finite=sources.precision.loss_scale is not None,
            clip=bool(clip_limits(plan)) and sources.trains,
            optimizer=plan.optimizer is not None and sources.trains,
            updates=any(b.update and b.stage == rank for b in buffers),
            kept=kept,
            prefetch=zero.prefetch,
            gather_once=zero.gather_once,
            scatter=zero.scatter,
        )
        for rank, work in enumerate(staging.work)
    ]


def clip_limits(plan: Plan) -> dict[str, float]:
    if plan.clip is None:
        return {}
    return {key: value for key, value in vars(plan.clip).items() if key.startswith("grad_") and value is not None}


def optimizer_options(plan: Plan) -> dict[str, Any] | None:
    optimizer = plan.optimizer
    if optimizer is None:
        return None
    return {
        "name": optimizer.name,
        **{k: list(v) if isinstance(v, tuple) else v for k, v in optimizer.options.items()},
        "schedule": optimizer.schedule,
        "warmup": optimizer.warmup,
        "total": optimizer.total,
        "min_lr": optimizer.min_lr,
    }


def whole_mesh(sources: Sources) -> Mesh:
    """The plan's mesh, its axes of one rank included, split into sub-axes as the layouts have it."""
    mesh, axes = sources.mesh, sources.plan.mesh
    sizes = {axis.name: tuple(map(mesh.size, mesh.parts(axis.name))) for axis in axes}
    return Mesh(tuple((axis.name, axis.size) for axis in axes)).split(sizes)


def stem(path: str) -> str:
    """The program's name: the plan's file name."""
    name = path.rsplit("/", 1)[-1]
    return name.removesuffix(".plan") or "plan"
