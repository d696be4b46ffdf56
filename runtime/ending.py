"""What a run says at its end."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from pathlib import Path

from runtime.data import Dataset, TextBytes
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


def summary(program: Program, dataset: Dataset, outcome: Outcome, found: Found, plan: str) -> list[str]:
    """The lines at the end of a run that went well: what was reached, where it is, and what to try next."""
    mean = math.fsum(outcome.losses) / len(outcome.losses)
    over = f"mean of the last {len(outcome.losses)} steps" if len(outcome.losses) > 1 else "the last step's"
    if isinstance(dataset, TextBytes):
        entropy = dataset.unigram_entropy()
        lines = [f"loss {mean:.2f} nats/byte ({over}); byte frequencies alone reach {entropy:.2f}, the unigram entropy"]
    else:
        lines = [f"loss {mean:.4g} ({over})"]
    lines.append(f"log         {found.log}")
    lines.append(f"checkpoint  {found.checkpoint or f'none: {NOT_SAVED}'}")
    lines += ["", "Try next:"]
    for command, why in next_commands(program, outcome, found, plan).items():
        lines += [f"  {command}", f"      {why}"]
    return lines


def next_commands(program: Program, outcome: Outcome, found: Found, plan: str) -> dict[str, str]:
    """Commands that show more of what a plan is, and what each does."""
    axis = next(iter(program.axes), None)
    other = f" --set {axis}={2 * program.axes[axis]}" if axis is not None else ""
    hints = {
        f"planc inspect {plan}": "every value with its layout, every communication",
        f"planc verify {plan}{other}": "compare with one device: loss, gradients, parameters",
    }
    if found.checkpoint is None:
        hints[f"planc run {plan}{other or ' --set train.steps=1000'}"] = (
            "the same training, divided differently" if other else "train for longer"
        )
    else:
        more = f" --set train.steps={2 * outcome.steps}"
        hints[f"planc run {plan} --resume{other}{more}"] = "go on from the checkpoint" + (
            ", divided differently" if other else ""
        )
    return hints
