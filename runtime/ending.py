"""What a run says at its end."""

from __future__ import annotations

import math
import os
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path

from runtime.data import Dataset, TextBytes
from runtime.mesh import axis_of
from runtime.program import Program

NOT_SAVED = "nothing is saved without train { save_every = … }"

PATIENCE = 3  # steps in a row without a finite loss, until a run gives up


@dataclass(frozen=True)
class Outcome:
    """How a run ended. status: the exit status, 128 and a signal's number if one stopped it. losses: the last ones,
    finite or not. saved: of the newest checkpoint that this run wrote, the step."""

    status: int
    steps: int
    losses: tuple[float, ...] = ()
    saved: int | None = None


@dataclass(frozen=True)
class Found:
    """The files that a run leaves."""

    log: Path
    checkpoint: Path | None


def interrupted(outcome: Outcome, found: Found) -> list[str]:
    name = signal.Signals(outcome.status - 128).name
    on = f"; --resume goes on from {found.checkpoint}" if found.checkpoint is not None else f"; {NOT_SAVED}"
    return [f"stopped by {name} after step {outcome.steps}{on}"]


def not_finite(program: Program, outcome: Outcome) -> str:
    """Why a run gave up, and what may help."""
    clip = "" if program.clip else ", or add `clip grad_norm = 1.0`"
    if math.isfinite(outcome.losses[-1]):
        return (
            f"stopped after step {outcome.steps}: gradients overflowed for {PATIENCE} steps in a row, at loss scales below "
            f"1. Something in the backward is not finite whatever the scale: look for it with `planc verify`, or compute "
            f"in bf16 (precision {{ compute = bf16 }})."
        )
    return (
        f"stopped after step {outcome.steps}: the loss was not finite ({outcome.losses[-1]}) for {PATIENCE} steps in a "
        f"row. Try a smaller learning rate or a longer warmup (optimizer {{ lr, warmup }}){clip}."
    )


def summary(program: Program, dataset: Dataset, outcome: Outcome, found: Found, plan: str | None) -> list[str]:
    """The lines at the end of a run that went well: what was reached, where it is, and what to try next. plan: as
    `planc run` was given it, with its options; None if the program was started without its plan."""
    mean = math.fsum(outcome.losses) / len(outcome.losses)
    over = f"mean of the last {len(outcome.losses)} steps" if len(outcome.losses) > 1 else "the last step's"
    if isinstance(dataset, TextBytes):
        entropy = dataset.unigram_entropy()
        lines = [f"loss {mean:.2f} nats/byte ({over}); byte frequencies alone reach {entropy:.2f}, the unigram entropy"]
    else:
        lines = [f"loss {mean:.4g} ({over})"]
    lines.append(f"log         {found.log}")
    lines.append(f"checkpoint  {found.checkpoint or f'none: {NOT_SAVED}'}")
    commands = next_commands(program, outcome, found, plan)
    lines += ["", "Try next:"] if commands else []
    for command, why in commands.items():
        lines += [f"  {command}", f"      {why}"]
    return lines


def next_commands(program: Program, outcome: Outcome, found: Found, plan: str | None) -> dict[str, str]:
    """Commands that show more of what a plan is, and what each does."""
    about = plan or original_plan(program)
    if about is None:
        return {}
    other = other_mesh(program)
    hints = {
        f"planc inspect {about}": "every value with its layout, every communication",
        f"planc verify {about}{other}": "compare with one device: loss, gradients, parameters",
    }
    if plan is None:  # `--set` may have made another model of it than the one that was trained
        return hints
    divided = ", divided differently" if other else ""
    longer = f" --set train.steps={2 * outcome.steps}"
    if program.train["epochs"] is not None:
        longer += f" --set train.epochs={2 * program.train['epochs']}"
    if found.checkpoint is not None:
        hints[f"planc run {plan} --resume{other}{longer}"] = f"go on from the checkpoint{divided}"
    else:
        hints[f"planc run {plan}{other or longer}"] = f"the same training{divided}" if other else "train for longer"
    return hints


def original_plan(program: Program) -> str | None:
    """The file beside the model that the program was compiled from, if it is still what it was."""
    base, folder = program.model.get("base"), program.folder
    if base is None or folder is None:
        return None
    path, copy = Path(base) / f"{program.name}.plan", folder / "plan.plan"
    if not path.is_file() or not copy.is_file() or path.read_bytes() != copy.read_bytes():
        return None
    return shlex.quote(os.path.relpath(path))


def other_mesh(program: Program) -> str:
    """The options of another division that compiles too: an axis of the batch twice as long, where rows and processors
    are enough, else an axis of one rank."""
    axes = program.axes
    data = next((axis_of(axis) for axis in program.batch_axes), None)
    parts = 2 * program.microbatches * math.prod(axes[axis] for axis in {axis_of(a) for a in program.batch_axes})
    fits = program.rows >= parts if program.ragged else program.rows % parts == 0
    if data is not None and fits and program.world <= (os.cpu_count() or 1):
        return f" --set {data}={2 * axes[data]}"
    longest = max(axes, key=axes.__getitem__, default=None)
    return f" --set {longest}=1" if longest is not None and axes[longest] > 1 else ""
