"""ZeRO: over which axes a parameter's state is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compiler.dsl.plan import Plan
from compiler.ir.graph import Value
from compiler.layout.placement import Layout, Mesh, Shard, Varying


@dataclass(frozen=True)
class Sharding:
    """The ZeRO of a plan: its stage (0: none), and how its stream gathers and reduces."""

    stage: int = 0
    axes: tuple[str, ...] = ()
    persist_below: int = 0
    prefetch: int = 1
    gather_once: bool = False
    scatter: bool = False

    def of(self, value: Value, trained: bool) -> tuple[str, ...]:
        """The axes over which the parameter's state is cut: those over which it is replicated, its gradient partial.

        A frozen parameter has no state but itself, so ZeRO 3 alone cuts it.
        """
        if math.prod(value.shape) < self.persist_below or not (trained or self.stage == 3):
            return ()
        layout = value.layout or Layout()
        if trained:
            return tuple(axis for axis in self.axes if isinstance(layout[axis], Varying))
        return tuple(axis for axis in self.axes if not isinstance(layout[axis], Shard))


def sharding(plan: Plan, mesh: Mesh) -> Sharding:
    """What the plan's `zero` says."""
    zero = plan.zero
    if zero is None:
        return Sharding()
    axes = tuple(axis for axis, size in mesh.axes if axis in zero.axes and size > 1)
    if not axes:
        return Sharding()
    scatter = zero.stage >= 2 if zero.accumulate is None else zero.accumulate == "scatter"
    return Sharding(zero.stage, axes, zero.persist_below, zero.prefetch, zero.gather == "step", scatter)
