"""The learning rate as a pure function of the step, so that resuming needs no state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class Schedule:
    """`Schedule(...)(step)` is the learning rate of the step, counted from 0.

    In the first `warmup` steps it grows linearly to `lr`: (step + 1) / warmup of it, so that no step is wasted at 0.
    Then it stays (`constant`) or falls, linearly or along half a cosine, to `min_lr` at step `total`, and stays there.
    Raises ValueError if a falling schedule has no steps to fall in.
    """

    lr: float
    kind: str = "constant"
    warmup: int = 0
    total: int = 0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown schedule {self.kind!r}; known are {', '.join(KINDS)}")
        if self.kind != "constant" and self.total <= self.warmup:
            raise ValueError(
                f"a {self.kind} schedule needs total > warmup, but total is {self.total} and warmup {self.warmup}"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any], steps: int) -> Schedule:
        """From a program's optimizer entry (an empty one gives 0); `steps`, of the run, is the default for `total`.

        A run that ends within its warm-up never falls, and one whose length is not known (0) stays constant.
        """
        warmup = int(options.get("warmup") or 0)
        total = int(options.get("total") or steps)
        kind = str(options.get("schedule", "constant"))
        return cls(
            lr=float(options.get("lr", 0.0)),
            kind=kind if total > warmup else "constant",
            warmup=warmup,
            total=total,
            min_lr=float(options.get("min_lr", 0.0)),
        )

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.lr
        progress = min(1.0, (step - self.warmup) / (self.total - self.warmup))
        left = 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr + (self.lr - self.min_lr) * left
