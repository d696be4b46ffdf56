"""What a plan's `precision { … }` means: in which dtype a parameter is read, updated and reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.loss_scale import LossScaling

if TYPE_CHECKING:
    from compiler.dsl.plan import Plan


@dataclass(frozen=True)
class Autocast:
    """The lower dtype ("bfloat16" or "float16"), and the device whose list of operations counts: "cpu" or "cuda"."""

    dtype: str
    device: str = "cpu"


@dataclass(frozen=True)
class Stored:
    """The dtypes of a trained parameter: of the copy that code reads, of its gradient's buffer (accumulated over
    micro-batches and reduced over ranks), and of the master that the optimizer updates (None: the copy itself)."""

    dtype: str
    reduce: str
    master: str | None


@dataclass(frozen=True)
class Precision:
    """A plan's precision, complete. None: as the model has it."""

    compute: str | None = None
    autocast: Autocast | None = None
    reduce: str | None = None
    master: str | None = None
    loss_scale: LossScaling | None = None

    @staticmethod
    def of(plan: Plan, widen: bool = False) -> Precision:
        """`widen`: everything is computed in float64, whatever the plan says (but for the loss scale)."""
        asked, scale = plan.precision, plan.precision.loss_scale
        scaling = None
        if scale is not None and plan.mode == "train":
            scaling = LossScaling() if scale == "dynamic" else LossScaling(float(scale), dynamic=False)
        if widen:
            return Precision(loss_scale=scaling)
        if not asked.autocast:
            return Precision(asked.compute, None, asked.reduce, asked.master, scaling)
        on_cpu = plan.cluster is None or plan.cluster.device == "cpu"
        autocast = Autocast(asked.compute or "bfloat16", "cpu" if on_cpu else "cuda")
        return Precision(None, autocast, asked.reduce, asked.master, scaling)

    def stored(self, own: str) -> Stored:
        """Of a trained parameter to which the model gave the dtype `own`."""
        read, master = self.compute or own, self.master or own
        return Stored(read, self.reduce or master, None if master == read else master)
