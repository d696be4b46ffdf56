"""The schedules that a plan can name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.diagnostics import did_you_mean
from compiler.schedule.actions import Pipeline, ScheduleError, whole_backwards
from compiler.schedule.auto import auto
from compiler.schedule.costs import StageCosts
from compiler.schedule.gpipe import gpipe
from compiler.schedule.one_f_one_b import interleaved, one_f_one_b, zb_h1
from compiler.schedule.v_shaped import dualpipe_v, zb_v

__all__ = ["NAMED", "StageCosts", "make_schedule"]


@dataclass(frozen=True)
class Named:
    """How a schedule is made from ranks, micro-batches and stages on each rank; how many stages those may be, and how
    many they are by default (None: any)."""

    make: Callable[[int, int, int], Pipeline]
    virtual: int | None
    default: int


NAMED: dict[str, Named] = {
    "gpipe": Named(lambda p, m, v: gpipe(p, m), 1, 1),
    "1f1b": Named(lambda p, m, v: one_f_one_b(p, m), 1, 1),
    "interleaved": Named(interleaved, None, 2),
    "zb_h1": Named(lambda p, m, v: zb_h1(p, m), 1, 1),
    "zb_v": Named(lambda p, m, v: zb_v(p, m), 2, 2),
    "dualpipe_v": Named(lambda p, m, v: dualpipe_v(p, m), 2, 2),
}


def make_schedule(
    name: str, ranks: int, microbatches: int, virtual: int | None = None, costs: StageCosts | None = None
) -> Pipeline:
    """The schedule `name` for `microbatches` on `ranks`, each with `virtual` stages (None: as the schedule has it).

    `costs` are read by `auto` alone. Raises ScheduleError.
    """
    if name == "auto":
        virtual = virtual or 1
        rivals = {n: other.make for n, other in NAMED.items() if other.virtual in (None, virtual)}
        return auto(ranks, microbatches, virtual, costs, rivals)
    if name not in NAMED:
        raise ScheduleError(f"there is no schedule `{name}`", " ".join(did_you_mean(name, [*NAMED, "auto"])))
    named = NAMED[name]
    if named.virtual is not None and virtual not in (None, named.virtual):
        stages = "one stage" if named.virtual == 1 else f"{named.virtual} stages"
        raise ScheduleError(
            f"`{name}` has {stages} on each rank, not {virtual}", f"use `virtual = {named.virtual}` or another schedule"
        )
    return whole_backwards(named.make(ranks, microbatches, virtual or named.default))
