"""Parameters of a program, and the buckets that they lie in."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.autodiff.local import cuts_text, shape_of
from compiler.dsl.plan import Plan
from compiler.ir.graph import Value
from compiler.layout.placement import Layout, Varying
from compiler.link.sources import Sources
from compiler.pipeline.staging import Staging
from compiler.pipeline.state import state_bytes
from compiler.schedule.buckets import Alike, Member, make_buckets
from compiler.schedule.work import CallInfo
from runtime.mesh import TIME
from runtime.program import Bucket, Parameter


def trained_names(infos: Sequence[CallInfo]) -> set[str]:
    """The parameters that a gradient reaches; the others have None in eager PyTorch too."""
    return {name for info in infos for name in info.trained}


def bytes_held(sources: Sources, infos: Sequence[CallInfo]) -> dict[str, int]:
    """What a rank holds of each parameter, with its gradient and the optimizer's state."""
    trained = trained_names(infos)
    return {
        value.name: state_bytes(sources.plan, value, sources.stored(value.name), sources.mesh, value.name in trained)
        for value in sources.parameters()
    }


def make_parameters(sources: Sources, infos: Sequence[CallInfo], staging: Staging) -> tuple[Parameter, ...]:
    trained, ranks = trained_names(infos), staging.parameter_ranks(infos)
    values = {value.name: value for value in sources.parameters()}
    found = []
    for name, info in sources.captured.parameters.items():
        value = values.get(name)
        cuts = cuts_text(value, sources.mesh) if value is not None else ""
        dtype = info.dtype if value is not None else info.own  # what nothing reads stays as it is
        found.append(Parameter(name, tuple(info.shape), dtype, name in trained, cuts, ranks.get(name, (0,))))
    return tuple(found)


def form_buckets(
    sources: Sources, infos: Sequence[CallInfo], parameters: Sequence[Parameter]
) -> tuple[Bucket, ...]:
    """Of trained parameters, and of those that ZeRO cuts, in the order in which their gradients become final."""
    users: dict[str, list[str]] = {}
    for info in reversed(infos):
        for name in reversed(dict.fromkeys(info.parameters)):
            users.setdefault(name, []).append(info.call.name)
            users[name] = users.pop(name)  # a later use in this order makes the gradient final
    values = {value.name: value for value in sources.parameters()}
    specs = {spec.name: spec for spec in parameters}
    members = []
    for name, calls in users.items():
        value, spec = values[name], specs[name]
        shard = sources.zero.of(value, spec.trained)
        if spec.trained or shard:
            alike = what_is_alike(sources, value, spec, shard)
            members.append(Member(name, shape_of(value, sources.mesh), alike, tuple(reversed(calls))))
    return make_buckets(members, bucket_size(sources), lambda name: decays(sources.plan, name))


def what_is_alike(sources: Sources, value: Value, spec: Parameter, shard: tuple[str, ...]) -> Alike:
    """What a parameter has in common with those that it may share a bucket with."""
    axes, reduce, master = (), "", ""
    if spec.trained:
        stored = sources.stored(spec.name)
        axes = reduce_axes(sources, value, len(spec.stages) > 1)
        reduce = "" if stored.reduce == spec.dtype else stored.reduce
        master = stored.master or ""
    zero, offload = (sources.zero.stage, sources.zero.offload) if shard else (0, "none")
    return Alike(spec.dtype, axes, shard, zero, spec.trained, spec.stages, reduce, master, offload)


def bucket_size(sources: Sources) -> int:
    """Bytes."""
    strategy = sources.plan.zero if sources.zero.stage else sources.plan.data
    return strategy.bucket if strategy is not None else 25_000_000


def reduce_axes(sources: Sources, value: Value, across_stages: bool) -> tuple[str, ...]:
    """The axes over which a parameter's gradient is a partial sum: also the pipeline's, if several stages use it."""
    layout = value.layout or Layout()
    return tuple(
        axis
        for axis, size in sources.mesh.axes
        if axis != TIME
        and size > 1
        and (isinstance(layout[axis], Varying) or across_stages and axis == sources.pipeline)
    )


def decays(plan: Plan, name: str) -> bool:
    """Whether the optimizer decays a parameter; the last of the plan's patterns to say so is `no_decay`."""
    spec = plan.optimizer
    if spec is None:
        return True
    if any(p.matches(name) for p in spec.no_decay):
        return False
    return not spec.decay or any(p.matches(name) for p in spec.decay)
