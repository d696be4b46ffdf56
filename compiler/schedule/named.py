"""The schedules that a plan can name."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.schedule.actions import Pipeline, ScheduleError
from compiler.schedule.flush import gpipe, one_f_one_b


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


def make_schedule(
    name: str, ranks: int, microbatches: int, virtual: int | None = None, costs: StageCosts | None = None
) -> Pipeline:
    """The schedule `name` for `microbatches` on `ranks`, each with `virtual` stages (None: as the schedule has it).

    `costs` are read by `auto` alone. Raises ScheduleError.
    """
    if name in ("gpipe", "1f1b"):
        if virtual not in (None, 1):
            raise ScheduleError(f"`{name}` has one stage on each rank, not {virtual}", "use `schedule = interleaved`")
        return {"gpipe": gpipe, "1f1b": one_f_one_b}[name](ranks, microbatches)
    raise ScheduleError(f"there is no schedule `{name}`", "known: `gpipe`, `1f1b`")
