"""Loss scaling: small gradients survive float16 because the loss is multiplied by a large factor.

The scaling of `torch.amp.GradScaler` (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740): a step whose
gradients are not all finite is left out and the scale is halved; after 2000 steps without one it is doubled. Whether a
step is left out is agreed over all ranks of all axes, so the scale is the same number everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossScaling:
    """initial: the scale of the first step. Where it is not `dynamic` it stays as it is, and steps whose gradients are
    not finite are left out all the same."""

    initial: float = 65536.0
    dynamic: bool = True
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


class LossScale:
    """The scale of a run. `value` is that of the next step, `clean` the steps since it changed."""

    def __init__(self, scaling: LossScaling):
        self.scaling = scaling
        self.value, self.clean = scaling.initial, 0

    def state(self) -> dict[str, float]:
        return {"scale": self.value, "clean": self.clean}

    def load(self, state: dict[str, float]) -> None:
        """Go on from what `state` returned; a scale that the plan fixes stays the plan's."""
        if self.scaling.dynamic:
            self.value, self.clean = float(state["scale"]), int(state["clean"])

    def update(self, skipped: bool) -> None:
        """At the end of a step; `skipped`: it was left out."""
        scaling = self.scaling
        if not scaling.dynamic:
            return
        self.clean = 0 if skipped else self.clean + 1
        if skipped:
            self.value *= scaling.backoff
        elif self.clean == scaling.interval:
            self.value, self.clean = self.value * scaling.growth, 0


@torch.no_grad()
def overflow(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """1 if an element is infinite or nan, else 0: a float32 scalar, so that ranks can take the largest."""
    largest = [torch.linalg.vector_norm(gradient, float("inf")) for gradient in gradients if gradient.numel()]
    finite = [torch.isfinite(item) for item in largest]
    return (~torch.stack(finite).all()).float() if finite else torch.zeros((), device=device)
