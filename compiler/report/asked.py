"""The table that ends every compile: what the plan asked for, and what was done about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from compiler.context.report import asked_context
from compiler.dsl.units import show_size
from compiler.overlap.segment import hidden
from compiler.pipeline.report import asked_pipeline
from compiler.precision import Precision
from compiler.recompute import FIT
from compiler.report.patterns import asked_patterns, recomputed
from compiler.report.rows import APPLIED, NOTHING, PARTLY, REFUSED, Asked, many
from compiler.report.zero import zero_rows
from compiler.tensor.found import found_styles
from compiler.tensor.styles import names
from runtime.cuts import parse_cuts
from runtime.program import Bucket

if TYPE_CHECKING:
    from compiler.driver import Compilation

def asked(compilation: Compilation) -> list[Asked]:
    """Every strategy and option that the plan spells out, in the plan's order."""
    return [*_data(compilation), *_others(compilation), *_graph(compilation)]


def _data(c: Compilation) -> Iterator[Asked]:
    plan, program = c.plan, c.program
    data = plan.data
    if data is None:
        return
    axes = ", ".join(data.axes)
    ways = [f"{axis}={plan.axis_size(axis)}" for axis in data.axes]
    if not program.batch_axes:
        yield Asked(f"data over {axes}", NOTHING, f"{' '.join(ways)}: one rank, nothing to communicate")
    else:
        reduced = [bucket for bucket in program.buckets if bucket.axes]
        count = sum(len(bucket.parameters) for bucket in reduced)
        yield Asked(
            f"data over {axes}",
            APPLIED,
            f"{many(len(program.inputs), 'input')} cut {' '.join(ways)}, {many(count, 'gradient')} reduced in "
            f"{many(len(reduced), 'bucket')}",
        )
    if "microbatches" in data.given:
        hoisted = len(c.linked.prologue.outputs) if c.linked.prologue else 0
        more = f", {many(hoisted, 'value')} computed once before the first" if hoisted else ""
        outcome = APPLIED if program.microbatches > 1 else NOTHING
        yield Asked(f"microbatches = {program.microbatches}", outcome, f"gradients accumulate over them{more}")
    if "bucket" in data.given:
        yield Asked(f"bucket = {data.bucket / 1e6:g}MB", APPLIED, many(len(program.buckets), "bucket"))
    if "tail" in data.given or program.full_batches:
        if program.full_batches:
            use = c.captured.counts_rows
            source = use.source if use else c.assigned.full_batches[0].origin.source
            does = "calculates with the number of rows" if use else "joins all rows"
            outcome = REFUSED if data.tail == "pad" else APPLIED
            yield Asked(f"tail = {data.tail}", outcome, f"only full batches: the model {does} ({source})")
        else:
            yield Asked(f"tail = {data.tail}", APPLIED, "an incomplete last batch is padded and masked"
                        if data.tail == "pad" else "an incomplete last batch is left out")  # fmt: skip


def _others(c: Compilation) -> Iterator[Asked]:
    plan, program = c.plan, c.program
    yield from zero_rows(c)
    yield from _tensor(c)
    yield from (Asked(*found) for found in asked_context(c))
    yield from (Asked(*found) for found in asked_pipeline(c))
    for word in ("zero", "tensor", "context", "pipeline"):
        strategy = getattr(plan, word)
        if strategy is not None and all(plan.axis_size(axis) == 1 for axis in strategy.axes):
            yield Asked(f"{word} over {', '.join(strategy.axes)}", NOTHING, "the axis has one rank")
    yield from asked_patterns(c)
    for rule in plan.recompute if plan.mode == "train" else ():
        names = ", ".join(f'"{pattern.text}"' for pattern in rule.patterns)
        if rule.policy == FIT:
            request = f"recompute {names} = fit({show_size(rule.limit or 0)})"
            chosen = str(c.fitted) if c.fitted is not None else "no segment of that name"
            yield Asked(request, APPLIED if c.fitted is not None else REFUSED, chosen)
            continue
        count = recomputed(c, rule)
        outcome = APPLIED if count else NOTHING
        yield Asked(f"recompute {names} = {rule.policy}", outcome, many(count, "segment"))
    if plan.mode == "forward":
        returned = many(len(program.results) + len(program.outputs), "tensor")
        yield Asked("mode = forward", APPLIED, f"{returned} returned, nothing kept for a backward")
    if plan.optimizer is not None and plan.mode == "train":
        trained = sum(parameter.trained for parameter in program.parameters)
        rest = len(program.parameters) - trained
        left = f", {rest} frozen or unused are left alone" if rest else ""
        yield Asked(f"optimizer {plan.optimizer.name}", APPLIED, many(trained, "parameter") + left)
    yield from _precision(c)
    for name, value in (program.clip or {}).items():
        yield Asked(f"clip {name} = {value:g}", APPLIED, "over all parameters, each element once")


def _precision(c: Compilation) -> Iterator[Asked]:
    program, given = c.program, c.plan.precision.given
    asked = c.plan.precision
    precision = Precision.of(c.plan)
    trained = [bucket for bucket in program.buckets if bucket.trained]

    def count(wanted: Callable[[Bucket], bool]) -> int:
        return sum(len(bucket.parameters) for bucket in trained if wanted(bucket))

    if "compute" in given or asked.autocast:
        lower = precision.autocast.dtype if precision.autocast else precision.compute
        casts = sum(node.op == "planc.cast" and node.args[1] == f"torch.{lower}" for node in c.assigned.main.nodes)
        read = sum(parameter.dtype == lower for parameter in program.parameters)
        if precision.autocast:
            listed = {"cpu": "CPUs", "cuda": "CUDA devices"}[precision.autocast.device]
            detail = f"{many(casts, 'cast')} to {lower}, by torch's list for {listed}"
            yield Asked("autocast = on", APPLIED if casts else NOTHING, detail)
        else:
            yield Asked(f"compute = {lower}", APPLIED, f"{many(read, 'parameter')} read in it")
    if "reduce" in given and asked.reduce:
        done = count(lambda bucket: (bucket.reduce or bucket.dtype) == asked.reduce)
        yield Asked(f"reduce = {asked.reduce}", APPLIED, f"{many(done, 'gradient')} accumulated and reduced in it")
    if "master" in given and asked.master:
        own = count(lambda bucket: bool(bucket.master))
        detail = f"{many(own, 'parameter')} updated in it, and rounded for the code to read"
        yield Asked(f"master = {asked.master}", *((APPLIED, detail) if own else (NOTHING, "parameters have that dtype anyway")))
    if program.loss_scale is not None:
        scale = program.loss_scale
        shown = "dynamic" if scale.dynamic else f"{scale.initial:g}"
        detail = f"from {scale.initial:g} on; " if scale.dynamic else ""
        yield Asked(f"loss_scale = {shown}", APPLIED, f"{detail}all {many(program.world, 'rank')} agree on what is left out")


def _tensor(c: Compilation) -> Iterator[Asked]:
    strategy = c.plan.tensor
    axes = c.mesh.parts(*strategy.axes) if strategy is not None else ()
    if strategy is None or not axes:
        return
    for axis in strategy.axes:
        if len(parts := c.mesh.parts(axis)) > 1:
            sizes = " ".join(f"{part}={c.mesh.size(part)}" for part in parts)
            yield Asked(f"tensor over {axis}", APPLIED, f"in sub-axes {sizes}, for what does not divide by {axis}")
    cut = {p.name for p in c.program.parameters if any(set(x.axes) & set(axes) for x in parse_cuts(p.cuts))}
    named: set[str] = set()
    for style in ("column", "row", "vocab", "replicate"):
        for pattern in getattr(strategy, style):
            hits = {p.name for p in c.program.parameters if names(pattern, p.name)} - named
            named |= hits
            done = hits if style == "replicate" else hits & cut
            outcome = APPLIED if done else REFUSED
            yield Asked(f'{style} "{pattern.text}"', outcome, f"{len(done)} of {len(hits)} parameters")
    if strategy.style == "auto":
        found = found_styles(c.lowered, c.assigned.main, axes, named)
        chosen = ", ".join(style for style in found.patterns if style != "whole") or "nothing"
        yield Asked("style = auto", APPLIED, f"{found.share:.0%} of all parameters are cut; chosen: {chosen}")
        for style, patterns in found.patterns.items():
            shown = ", ".join(f'"{pattern}"' for pattern in patterns[:8]) + (", …" if len(patterns) > 8 else "")
            yield Asked(f"  {'left whole' if style == 'whole' else style}", APPLIED, shown)
    if strategy.sequence:
        place = c.assigned.main.nodes
        count = sum(n.op in ("planc.reduce_scatter", "planc.shard") and axes[0] in n.args[1] for n in place)
        outcome = APPLIED if count else REFUSED
        yield Asked("sequence = on", outcome, f"{count} activations are cut along the sequence")
    if strategy.overlap:
        yield _overlap(c, axes)


def _overlap(c: Compilation, axes: Sequence[str]) -> Asked:
    """Of the collectives of all segments over the tensor axes: what hides them."""
    total: Counter[str] = Counter()
    for kind in c.linked.kinds.values():
        total.update({how: count * len(kind.calls) for how, count in hidden(kind.code, axes).items()})
    exposed = {"beside no product": total["alone"], "not cut by rows": total["apart"]}
    outcome = PARTLY if total["in pieces"] else REFUSED
    outcome = NOTHING if not total else outcome if any(exposed.values()) else APPLIED
    parts = [
        f"{total['in pieces']} of {many(total.total(), 'collective')} in pieces",
        f"{total['behind']} behind other work",
        *(f"{count} {why}" for why, count in exposed.items() if count),
    ]
    return Asked("overlap = on", outcome, ", ".join(parts))


def _graph(c: Compilation) -> Iterator[Asked]:
    for op, count in Counter(node.op for node in c.assigned.fallbacks).items():
        node = next(node for node in c.assigned.fallbacks if node.op == op)
        if any(len(value.layout or ()) for value in node.inputs) or c.program.batch_axes:
            yield Asked(
                f"layout of {op}", PARTLY, f"no rule: its {count} calls work on whole values ({node.origin.source})"
            )
