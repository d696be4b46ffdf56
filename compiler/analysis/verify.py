"""verify: does the program compute what the model means? In float64, in the simulator, against eager PyTorch."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compiler.analysis.reference import Trajectory, build_model, run_forward, run_reference
from compiler.capture.capture import matches
from compiler.driver import Options, compile
from compiler.dsl.plan import Plan
from runtime.cuts import parse_cuts, positions
from runtime.program import Program
from runtime.program import load as load_program
from runtime.session import Session
from runtime.simulate import simulate

TOLERANCE = 1e-10
SMALL = 1e-4
"""Magnitude below which errors count as absolute: 1e-10 of it is 1e-14, some tens of roundings of a term of size 1.
What is zero by cancellation (the gradient of a bias in front of a normalisation) is the rounding of such terms, on one
device as on many."""


@dataclass(frozen=True)
class Deviation:
    """How far one compared tensor is off: the largest absolute difference over the largest magnitude of the truth."""

    what: str
    error: float


@dataclass(frozen=True)
class Verdict:
    """The comparison of every tensor, worst first. `broken`: what is not finite on one device already, "" if nothing."""

    deviations: tuple[Deviation, ...]
    ranks: int
    steps: int
    broken: str = ""

    @property
    def worst(self) -> Deviation:
        return self.deviations[0]

    @property
    def ok(self) -> bool:
        return not self.broken and self.worst.error <= TOLERANCE


def verify(plan: Plan, steps: int = 3, seed: int = 0, short_rows: bool = True, timeout: float = 120.0) -> Verdict:
    """Compare loss, metrics, every gradient of every step, and parameters and buffers after `steps` steps.

    Batches are random, labels are masked unevenly (some rows wholly), and if the program takes short batches the last
    step gets one. Of a forward-only program, the outputs for `steps` batches. Raises PlanError if the plan does not
    compile, RankFailure if a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="planc-verify-") as folder:
        compilation = compile(plan, options=Options(widen=True))
        program = load_program(compilation.write(Path(folder) / "program"))
        batches = [random_batch(program, seed + k) for k in range(steps)]
        rows = [program.rows] * steps
        if short_rows and program.ragged and program.rows > 1:
            rows[-1] = max(1, program.rows - 1)
        cut = [take_rows(program, batch, count) for batch, count in zip(batches, rows)]
        model = build_model(program, int(program.train["seed"]))
        state = {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
        loss = (plan.loss.factory, dict(plan.loss.options)) if plan.loss else None
        broken = ""
        if plan.mode == "forward":
            returned = run_forward(program, model, cut, loss)
            results = simulate(program, lambda session: [session.forward(batch) for batch in cut], state, timeout)
            deviations = compare_outputs(returned, results)
        else:
            truth = run_reference(program, model, cut, loss, lambda name: matches(plan.freeze, name))
            broken = not_finite(truth)
            parts = simulate(program, lambda session: run_steps(session, cut), state, timeout)
            deviations = compare(truth, assemble(program, parts), optimizer_gain(program))
    return Verdict(tuple(sorted(deviations, key=lambda d: -d.error)), program.world, steps, broken)


def not_finite(truth: Trajectory) -> str:
    """The first loss or gradient with nan or inf in it, or ""."""
    for step, (loss, gradients) in enumerate(zip(truth.losses, truth.gradients, strict=True), 1):
        if not math.isfinite(loss):
            return f"loss of step {step} ({loss})"
        for name, gradient in gradients.items():
            if not gradient.isfinite().all():
                return f"gradient of {name} in step {step}"
    return ""


def optimizer_gain(program: Program) -> Callable[[Tensor], Tensor]:
    """How far a step may move each element for each unit of error in its gradient, given the gradient.

    AdamW divides by its size: of a gradient that is nothing but rounding (of a key's bias, which attention takes no notice
    of), a step makes up to lr / eps of the rounding, on one device as on many.
    """
    options = program.optimizer or {}
    lr, eps = float(options.get("lr", 0.0)), float(options.get("eps", 1e-8))
    if options.get("name") != "adamw":
        return lambda gradient: torch.full_like(gradient, lr)
    return lambda gradient: lr / (gradient.abs() + eps)


@dataclass
class RankRun:
    """One rank's trajectory in its own parts, and where it stands."""

    trajectory: Trajectory
    sizes: dict[str, int]
    coords: dict[str, int]


def run_steps(session: Session, batches: Sequence[Mapping[str, Tensor]]) -> RankRun:
    found = Trajectory()
    trained = {name for bucket in session.program.buckets for name in bucket.parameters}
    for batch in batches:
        result = session.step(batch)
        found.losses.append(result.loss)
        found.metrics.append(result.metrics)
        found.gradients.append({n: g.clone() for n, g in session.gradients().items() if n in trained})
    found.parameters = {name: p.clone() for name, p in session.parameters().items()}
    found.buffers = {name: b.clone() for name, b in session.state.buffers.items()}
    return RankRun(found, dict(session.context.sizes), dict(session.context.coords))


def random_batch(program: Program, seed: int) -> dict[str, Tensor]:
    """A random batch of the program's rows: integers in the ranges that the model allows, labels partly ignored."""
    generator = torch.Generator().manual_seed(seed)
    batch = {}
    for spec in program.inputs:
        shape = list(spec.shape)
        if spec.batch_dim is not None:
            shape[spec.batch_dim] = program.rows
        dtype = getattr(torch, spec.dtype)
        if dtype == torch.bool:
            value = torch.rand(shape, generator=generator) < 0.7
        elif dtype.is_floating_point:
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        else:
            value = torch.randint(0, spec.below or 2, shape, generator=generator, dtype=dtype)
            if spec.ignore is not None and len(shape) > 1:
                # Rows keep none, a quarter, half, … of their labels.
                keep = torch.arange(shape[0]) % 5 / 4.0
                drop = torch.rand(shape, generator=generator) >= keep.view(-1, *[1] * (len(shape) - 1))
                value = value.masked_fill(drop, spec.ignore)
                value[-1 if shape[0] > 1 else 0, ..., -1] = 0
                value[0, ..., -1] = 0
        batch[spec.name] = value
    return batch


def take_rows(program: Program, batch: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    dims = {spec.name: spec.batch_dim for spec in program.inputs}
    return {n: t if dims[n] is None else t.narrow(dims[n] or 0, 0, rows) for n, t in batch.items()}


def assemble(program: Program, runs: Sequence[RankRun]) -> list[Trajectory]:
    """Every rank's trajectory with whole tensors put together from all ranks' parts; replicas stay apart, so that one
    that drifted is seen."""
    specs = {p.name: p for p in program.parameters}
    whole: list[Trajectory] = []
    for run in runs:
        one = Trajectory(run.trajectory.losses, run.trajectory.metrics)
        stages = [r for r in runs if all(r.coords[a] == run.coords[a] for a in program.mesh if a != program.pipeline)]
        # Itself where it can, else the stage that has it.
        stages.sort(key=lambda peer: (peer is not run, peer.coords.get(program.pipeline, 0)))

        def full(name: str, pick) -> Tensor:  # type: ignore[no-untyped-def]
            cuts = parse_cuts(specs[name].cuts) if name in specs else ()
            has = next(peer for peer in stages if name in pick(peer))
            if not cuts:
                return pick(has)[name]
            axes = {axis for cut in cuts for axis in cut.axes}
            result = torch.empty(specs[name].shape, dtype=pick(has)[name].dtype)
            for peer in runs:
                if all(peer.coords[a] == has.coords[a] for a in program.mesh if a not in axes):
                    part, index = pick(peer)[name], []
                    for dim, size in enumerate(specs[name].shape):
                        own = [cut for cut in cuts if cut.dim == dim]
                        where = positions(own, size, peer.sizes, peer.coords, part.device, mark_padding=True)
                        part = part.index_select(dim, (where >= 0).nonzero().flatten())
                        index.append(where[where >= 0])
                    result[torch.meshgrid(*index, indexing="ij")] = part
            return result

        for step in range(len(run.trajectory.gradients)):
            names = dict.fromkeys(name for peer in stages for name in peer.trajectory.gradients[step])
            one.gradients.append({name: full(name, lambda peer: peer.trajectory.gradients[step]) for name in names})
        names = dict.fromkeys(name for peer in stages for name in peer.trajectory.parameters)
        one.parameters = {name: full(name, lambda peer: peer.trajectory.parameters) for name in names}
        at = {peer.coords.get(program.pipeline, 0): peer.trajectory.buffers for peer in stages}
        one.buffers = {buffer.name: at[buffer.stage][buffer.name] for buffer in program.buffers}
        whole.append(one)
    return whole


def compare(truth: Trajectory, found: Sequence[Trajectory], gain: Callable[[Tensor], Tensor]) -> Iterator[Deviation]:
    """Every comparison. `gain` carries the rounding of gradients over to parameters."""
    largest = [max((size(item) for item in step.values()), default=0.0) for step in truth.gradients]
    carried = {
        name: sum(
            (
                gain(step[name]) * (TOLERANCE * SMALL * max(most, 1.0))
                for step, most in zip(truth.gradients, largest)
                if name in step
            ),
            torch.zeros_like(value),
        )
        for name, value in truth.parameters.items()
    }
    typical = [sum(gain(torch.tensor(size(step[name]))) for step in truth.gradients if name in step) for name in carried]
    drifted = torch.tensor(max(map(float, typical), default=0.0)) * (TOLERANCE * SMALL * max([*largest, 1.0]))
    for rank, one in enumerate(found):
        at = f" on rank {rank}"
        for step, (a, b) in enumerate(zip(truth.losses, one.losses, strict=True), 1):
            yield Deviation(f"loss of step {step}{at}", relative(torch.tensor(a), torch.tensor(b)))
        for step, (m, n) in enumerate(zip(truth.metrics, one.metrics, strict=True), 1):
            for name in n:
                yield Deviation(f"metric {name} of step {step}{at}", relative(torch.tensor(m[name]), torch.tensor(n[name])))
        for step, (g, h) in enumerate(zip(truth.gradients, one.gradients, strict=True), 1):
            # A gradient that is zero but for rounding (of a bias in front of a normalisation) is rounding of terms as
            # large as other gradients are.
            for name in g.keys() | h.keys():
                missing = name not in g or name not in h
                error = math.inf if missing else relative(g[name], h[name], SMALL * max(largest[step - 1], 1.0))
                yield Deviation(f"gradient of {name} in step {step}{at}", error)
        after = f"after {len(truth.losses)} steps{at}"
        for name, value in one.parameters.items():
            error = relative(truth.parameters[name], value, SMALL, carried[name])
            yield Deviation(f"parameter {name} {after}", error)
        for name, value in one.buffers.items():
            # Running statistics follow the parameters in front of them.
            error = relative(truth.buffers[name], value, SMALL, drifted)
            yield Deviation(f"buffer {name} {after}", error)


def compare_outputs(
    truth: Sequence[Mapping[str, Tensor]], found: Sequence[Sequence[Mapping[str, Tensor]]]
) -> Iterator[Deviation]:
    """Every output of every batch on every rank."""
    for rank, batches in enumerate(found):
        for k, (wanted, given) in enumerate(zip(truth, batches, strict=True)):
            for name in wanted.keys() | given.keys():
                missing = name not in wanted or name not in given
                error = math.inf if missing else relative(wanted[name], given[name])
                yield Deviation(f"output {name} of batch {k} on rank {rank}", error)


def size(tensor: Tensor) -> float:
    """The largest magnitude in it."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def relative(truth: Tensor, found: Tensor, floor: float = SMALL, carried: Tensor | None = None) -> float:
    """max |found - truth| / max(max |truth|, floor); inf for a shape or a NaN that differs. `carried` are absolute
    differences that rounding elsewhere explains, broadcast to the elements."""
    if truth.shape != found.shape:
        return math.inf
    if truth.numel() == 0:
        return 0.0
    truth, found = truth.double(), found.double()
    differences = (truth - found).abs()
    if differences.isnan().any():
        return 0.0 if torch.equal(truth.isnan(), found.isnan()) and truth.isnan().all() else math.inf
    if carried is not None:
        differences = (differences - carried).clamp_(min=0.0)
    return differences.max().item() / max(size(truth), floor)
