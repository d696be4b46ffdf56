"""ZeRO: over which axes a parameter's state is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compiler.dsl.plan import Plan, ZeroStrategy
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
    offload: str = "none"

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


def hybrid_parts(plan: Plan) -> dict[str, tuple[int, ...]]:
    """For each axis of hybrid sharding the sizes of its sub-axes: replicated over the outer one, sharded over the inner
    one, which are neighbouring ranks (Zhao et al. 2023, section 3.2.2)."""
    zero = plan.zero
    if zero is None or zero.hybrid is None:
        return {}
    found, left = {}, zero.hybrid
    for axis in reversed(plan.mesh):
        if axis.name in zero.axes:
            inner = math.gcd(axis.size, left)
            left //= inner
            if 1 < inner < axis.size:
                found[axis.name] = (axis.size // inner, inner)
    return found


def shard_axes(zero: ZeroStrategy, mesh: Mesh) -> tuple[str, ...]:
    """The axes of the mesh, split into sub-axes as `hybrid_parts` says, over which state is cut: the innermost ones that
    make groups of the hybrid's size, or all."""
    found: list[str] = []
    left = zero.hybrid
    for axis in reversed(mesh.parts(*zero.axes)):
        if left is not None:
            if left % mesh.size(axis):
                continue
            left //= mesh.size(axis)
        if mesh.size(axis) > 1:
            found.append(axis)
    return tuple(reversed(found))


def sharding(plan: Plan, mesh: Mesh) -> Sharding:
    """What the plan's `zero` says."""
    zero = plan.zero
    if zero is None:
        return Sharding()
    axes = shard_axes(zero, mesh)
    if not axes:
        return Sharding()
    scatter = zero.stage >= 2 if zero.accumulate is None else zero.accumulate == "scatter"
    once = zero.gather == "step"
    return Sharding(zero.stage, axes, zero.persist_below, zero.prefetch, once, scatter, zero.offload)
