"""The training loop of a program folder: data, steps, progress, log, checkpoints."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from runtime.checkpoint import CheckpointError, InitialWeights, checkpoints, latest, prune, step_path
from runtime.console import MessageLines, Progress, StepReport, memory_bytes
from runtime.data import Batch, Dataset, Loader, Sampler, open_dataset
from runtime.ending import PATIENCE, Found, Outcome, interrupted, not_finite, summary
from runtime.errors import TrainError
from runtime.executor import StepResult
from runtime.factory import FactoryError, resolve
from runtime.failing import failed
from runtime.interrupt import Interrupt
from runtime.log import JsonLog, to_line
from runtime.lr import Schedule
from runtime.program import Program, ProgramError
from runtime.program import load as load_program
from runtime.run_files import RunFiles, writing
from runtime.session import Session
from runtime.trace import Tracer, measured_bubble, write_trace
from runtime.transport import Transport, TransportError, connect, together

_RECENT = 20  # steps over which the final loss is averaged, at most


def train(
    folder: str | Path,
    resume: bool = False,
    transport: Transport | None = None,
    weights: str | Path | None = None,
    plan: str | None = None,
    stream: TextIO | None = None,
    trace: str | Path | None = None,
    json: bool = False,
) -> int:
    """Train a program as its plan's `train { … }` says; the exit status.

    0: done. 1: it could not begin, it failed, or the loss was not finite for some steps in a row. 130, 143: stopped by
    Ctrl-C or SIGTERM, after a whole step. Messages go to `stream` (stdout) and stderr: those of a run from rank 0
    alone, of a failure from every rank (see `runtime.failing`).

    resume: go on from the newest complete checkpoint of the run, if there is one. transport: default: see `connect`.
    weights: a safetensors file or folder to begin with. plan: the plan's path and `--set` options, for the hints at the
    end. trace: a file for a Chrome trace of some steps. json: what `stream` gets is one JSON object per line: the records
    of the log, each `{"message": …}`, and at last `{"done": steps, "status": …}` or `{"error": …}`.
    A second Ctrl-C is raised as KeyboardInterrupt.
    """
    stream = stream or sys.stdout

    def refuse(error: Exception) -> int:
        print(to_line(error=str(error)) if json else f"planc: {error}", file=stream if json else sys.stderr, flush=True)
        return 1

    try:
        program = load_program(folder)
        transport = transport or connect()
    except (ProgramError, TransportError) as error:
        return refuse(error)
    try:
        check_trainable(program)
        files = RunFiles.of(program, trace)
        with ExitStack() as stack:
            with together(transport, TrainError, ""):
                if transport.rank == 0:
                    stack.enter_context(files.claimed())
            run = Run(program, transport, weights, stream, files, json)
            outcome = run.train(resume)
            if transport.rank == 0:
                run.close(outcome, plan)
        return outcome.status
    except (ProgramError, FactoryError, CheckpointError, TrainError) as error:  # The same on every rank.
        return refuse(error) if transport.rank == 0 else 1
    except Exception as error:
        failed(transport, error)
        return 1
    except BaseException as error:
        transport.abort(type(error).__name__)
        raise
    finally:
        transport.close()


def check_run(program: Program, trace: str | Path | None = None) -> None:
    """What can be told before the ranks start, which tell it too. Raises TrainError."""
    check_trainable(program)
    RunFiles.of(program, trace).check()


def check_trainable(program: Program) -> None:
    if program.mode == "forward":
        raise TrainError(
            f"{program.name} is a forward-only program (mode = forward), which has nothing to train; call it from "
            f"Python: `session = runtime.load(FOLDER)`, then `session.forward(batch)`"
        )
    if program.optimizer is None:
        raise TrainError("the plan has no optimizer, so there is nothing to train")


class Run:
    """One rank's part of a run."""

    def __init__(
        self, program: Program, transport: Transport, weights: str | Path | None, stream: TextIO, files: RunFiles,
        json: bool = False,
    ):  # fmt: skip
        self.program, self.transport, self.stream, self.json = program, transport, stream, json
        self.options: Mapping[str, Any] = program.train
        self.directory, self.log_path, self.trace = files.directory, files.log, files.trace
        self.first = transport.rank == 0
        with together(transport, TrainError, ""):
            self.dataset = self.open_data()
        with together(transport, CheckpointError, ""):
            state = InitialWeights(program, weights) if weights is not None else None
        self.session = Session(program, transport, state)
        self.unit, self.items_per_row = batch_unit(program)

    def open_data(self) -> Dataset:
        program, base = self.program, self.program.model.get("base")
        return open_dataset(
            str(self.options["data"]),
            program.inputs,
            resolve=lambda spec: resolve(spec, base),
            seed=int(self.options["seed"]),
            samples=max(1024, 4 * program.rows),
        )

    def say(self, text: str) -> None:
        if self.first:
            print(to_line(message=text) if self.json else text, file=self.stream, flush=True)

    # -- begin ---------------------------------------------------------------------------------------------------

    def begin(self, resume: bool) -> Sampler:
        """Restore what is to be restored; the sampler stands where the data goes on."""
        saving = self.options["save_every"] is not None
        (text, *_) = self.transport.gather_objects(self.find_checkpoint(resume) if self.first else None)
        if not resume and text is not None and saving:
            raise TrainError(f"{text} is left from another run: go on with --resume, or delete {self.directory} first")
        data: dict[str, Any] | None = None
        if resume and text is None:
            self.say(f"no checkpoint in {self.directory}: starting from the beginning")
        elif resume:
            data = self.session.restore(text)
            self.say(f"going on from {text}")
        sampler = self.make_sampler()
        if data is not None:
            sampler.load_state(data)
            if data.get("samples", sampler.n_samples) != sampler.n_samples:
                self.say(f"note: the data has {sampler.n_samples} samples, and had {data['samples']}: others come next")
        return sampler

    def find_checkpoint(self, resume: bool) -> str | None:
        """To resume, the newest complete one; else any at all."""
        if resume:
            path = latest(self.directory, note=self.say)
        else:
            path = next(iter(checkpoints(self.directory).values()), None)
        return None if path is None else str(path)

    def make_sampler(self) -> Sampler:
        tail = self.options.get("tail", "pad") if self.program.ragged else "drop"
        try:
            # The seed of the session is that of the checkpoint: the order must go on as it was.
            return Sampler(
                len(self.dataset),
                self.program.rows,
                self.session.context.seed,
                bool(self.options["shuffle"]),
                tail=str(tail),
            )
        except ValueError as error:
            raise TrainError(f"data {self.options['data']!r}: {error}") from None

    def make_loader(self, sampler: Sampler) -> Loader:
        dims = {spec.name: spec.batch_dim for spec in self.program.inputs}
        pin = self.transport.device.type == "cuda"
        return Loader(self.dataset, sampler, range(*self.session.row_range()), dims, pin=pin)

    # -- steps ---------------------------------------------------------------------------------------------------

    def train(self, resume: bool) -> Outcome:
        """All steps; closes what it opens."""
        session = self.session
        sampler = self.begin(resume)
        total = total_steps(self.options, sampler, session.steps)
        session.schedule = Schedule.from_options(self.program.optimizer or {}, total)
        if session.steps >= total:
            self.say(f"nothing left to do: {session.steps} of {total} steps are done")
            return Outcome(0, session.steps)
        with ExitStack() as stack:
            loader = stack.enter_context(self.make_loader(sampler))
            interrupt = stack.enter_context(Interrupt(self.transport))
            reporter = None
            if self.first:
                echo = self.stream if self.json else None
                with writing(self.log_path):
                    log = stack.enter_context(JsonLog(self.log_path, session.steps or None, echo))
                shown = MessageLines if self.json else Progress
                progress = shown(total, self.unit, session.steps, stream=self.stream, device=self.transport.device)
                reporter = Reporter(self, log, stack.enter_context(progress))
            return self.steps(total, loader, interrupt, reporter)

    def steps(self, total: int, loader: Loader, interrupt: Interrupt, reporter: Reporter | None) -> Outcome:
        session, every = self.session, self.options["save_every"]
        losses: deque[float] = deque(maxlen=min(_RECENT, max(1, (total - session.steps) // 10)))
        bad, saved = 0, None
        traced = traced_steps(session.steps, total) if self.trace is not None else range(0)
        tracer = Tracer(session)
        started = time.perf_counter()
        while session.steps < total:
            step = session.steps + 1
            self.transport.describe(f"load the batch of step {step}")
            batch = next(loader)
            with tracer if step in traced else nullcontext():
                result = session.step(batch.tensors, batch.valid, local=True)
            ended = time.perf_counter()
            if step in traced and step == traced[-1]:
                self.write_trace(tracer)
            losses.append(result.loss)
            if reporter is not None:
                reporter.report(step, batch, result, ended - started)
            bad = 0 if sound(result) else bad + 1
            if bad == 1 and not math.isfinite(result.loss) and reporter is not None:
                reporter.progress.message(f"warning: step {step}: the loss is {result.loss}")
            if bad == PATIENCE:
                return Outcome(1, session.steps, tuple(losses), saved)
            stop = interrupt.agreed()
            # A state that is not finite is worth nothing: the last good checkpoint stays the newest.
            if every is not None and not bad and (session.steps % every == 0 or session.steps == total or stop):
                self.save(loader)
                saved = session.steps
            if stop:
                return Outcome(128 + stop, session.steps, tuple(losses), saved)
            started = time.perf_counter()
        return Outcome(0, session.steps, tuple(losses), saved)

    def write_trace(self, tracer: Tracer) -> None:
        """Write the trace of all ranks. Collective."""
        assert self.trace is not None
        events, mesh = tracer.gathered(), self.session.mesh
        if self.first:
            axes = {rank: " ".join(f"{a}={c}" for a, c in mesh.coords(rank).items()) for rank in range(mesh.size)}
            self.transport.describe("write the trace")
            with writing(self.trace):
                write_trace(events, self.trace, {rank: f"rank {rank}: {where}" for rank, where in axes.items()})
            idle = f", measured bubble {measured_bubble(events):.1%}" if self.program.stages > 1 else ""
            self.say(f"trace: {self.trace}{idle}")

    def save(self, loader: Loader) -> None:
        """Write a checkpoint; delete those that are too many."""
        path = step_path(self.directory, self.session.steps)
        self.session.save(path, {**loader.state.to_dict(), "samples": len(self.dataset)})
        if self.first:
            prune(self.directory, int(self.options["keep"]))

    # -- end -----------------------------------------------------------------------------------------------------

    def close(self, outcome: Outcome, plan: str | None) -> None:
        """What there is to say at the end, on rank 0."""
        found = Found(self.log_path, None if outcome.saved is None else step_path(self.directory, outcome.saved))
        if outcome.status > 128:
            lines = interrupted(outcome, found)
        elif outcome.status:
            lines = [not_finite(self.program, outcome)]
        else:
            lines = summary(self.program, self.dataset, outcome, found, plan) if outcome.losses else []
        if self.json:
            files = {"log": str(found.log), "checkpoint": None if found.checkpoint is None else str(found.checkpoint)}
            failure = {"error": lines[0]} if outcome.status else {}
            print(to_line(done=outcome.steps, status=outcome.status, **failure, **files), file=self.stream, flush=True)
            return
        for line in lines:
            self.say(line)


@dataclass
class Reporter:
    """The progress line and the log, on rank 0."""

    run: Run
    log: JsonLog
    progress: Progress

    def report(self, step: int, batch: Batch, result: StepResult, seconds: float) -> None:
        run = self.run
        items = batch.valid * run.items_per_row
        lr = run.session.schedule(step - 1)
        self.progress.update(StepReport(step, result.loss, items, seconds, result.grad_norm, lr))
        run.transport.describe("write the log")
        with writing(run.log_path):
            self.log.write(
                step,
                epoch=batch.epoch,
                loss=result.loss,
                metrics=result.metrics,
                lr=lr,
                grad_norm=result.grad_norm,
                **scaling(result),
                seconds=round(seconds, 6),
                memory=memory_bytes(run.transport.device),
                **{f"{run.unit}_per_s": round(items / seconds, 1)},
                **({"grad_norms": result.grad_norms} if result.grad_norms else {}),
            )
        if result.skipped:
            self.progress.message(f"step {step} left out: gradients overflowed at loss scale {result.loss_scale:g}")


def traced_steps(done: int, total: int) -> range:
    """The steps that a trace shows, counted from 1, of a run that has `done` of them behind it: three behind the first
    one, which warms up; fewer where there are no more."""
    begin = min(done + 2, total)
    return range(begin, min(begin + 3, total + 1))


def sound(result: StepResult) -> bool:
    """Whether a step is worth going on from: its loss is finite, and its gradients are at some loss scale."""
    return math.isfinite(result.loss) and not (result.skipped and (result.loss_scale or 1.0) < 1.0)


def scaling(result: StepResult) -> dict[str, Any]:
    """What the log says about the loss scale, where there is one."""
    return {} if result.loss_scale is None else {"loss_scale": result.loss_scale, "skipped": result.skipped}


def total_steps(options: Mapping[str, Any], sampler: Sampler, done: int) -> int:
    """The steps of the whole run: `steps`, or those until the end of `epochs` epochs; the smaller of both if given.

    `done` steps have been taken, and the sampler stands behind them.
    """
    steps, epochs = options["steps"], options["epochs"]
    if epochs is None and steps is not None:
        return int(steps)
    state, batch = sampler.state, sampler.global_batch
    left = sampler.n_samples - state.position
    current = left // batch if sampler.tail == "drop" else math.ceil(left / batch)
    later = (int(epochs or 1) - state.epoch - 1) * sampler.steps_per_epoch
    by_epochs = done + max(0, current + later)
    return by_epochs if steps is None else min(int(steps), by_epochs)


def batch_unit(program: Program) -> tuple[str, int]:
    """What rates count, and how many of it a row has: tokens where an input holds a row of integers, else samples."""
    for spec in program.inputs:
        if spec.batch_dim == 0 and len(spec.shape) == 2 and spec.dtype == "int64":
            return "tokens", spec.shape[1]
    return "samples", 1
