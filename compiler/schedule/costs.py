"""What the parts of a pipeline cost: what schedules are timed with, and what `auto` reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageCosts:
    """Per virtual stage: seconds of forward, input-gradient and weight-gradient part of a micro-batch, and the bytes
    that its backward keeps alive. `limit`: bytes of activations on a rank (None: no limit); `transfer`: seconds from
    one rank to the next."""

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    activation: tuple[int, ...]
    limit: int | None = None
    transfer: float = 0.0

    def seconds(self, kind: str, stage: int) -> float:
        """How long an action of `kind` on `stage` takes; a whole backward is both of its parts."""
        if kind == "F":
            return self.forward[stage]
        return self.input[stage] * (kind in "BI") + self.weight[stage] * (kind in "BW")


def equal_costs(
    stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0, limit: int | None = None
) -> StageCosts:
    """The same costs for every stage, and activations of one byte: what the papers draw."""
    return StageCosts((forward,) * stages, (input,) * stages, (weight,) * stages, (1,) * stages, limit)
