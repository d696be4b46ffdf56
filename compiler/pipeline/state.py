"""What a rank holds of a parameter all step long: itself, its gradient, the optimizer's state, and a master copy."""

from __future__ import annotations

import math

import torch

from compiler.autodiff.local import shape_of
from compiler.dsl.plan import OptimizerSpec, Plan
from compiler.ir.graph import Value
from compiler.layout.placement import Mesh
from compiler.precision import Stored
from compiler.zero import sharding


def state_bytes(plan: Plan, value: Value, stored: Stored, mesh: Mesh, trained: bool) -> int:
    """Bytes on the device of a rank; what ZeRO cuts counts as the part of each (Rajbhandari et al. 2020)."""
    zero = sharding(plan, mesh)
    ways = math.prod(mesh.size(axis) for axis in zero.of(value, trained))
    held = [(stored.dtype, 3)]  # dtype, and the stage of ZeRO that cuts it
    if trained and plan.mode == "train":
        master = stored.master or stored.dtype
        held += [(stored.reduce, 2)]
        held += [(master, 1)] * (moments(plan.optimizer) + (stored.master is not None))
    offload = plan.zero.offload if plan.zero is not None else "none"
    if offload in ("params", "all"):
        held = held[1:]
    if offload in ("optimizer", "all"):
        held = [part for part in held if part[1] > 1]
    size = sum(getattr(torch, dtype).itemsize / (ways if zero.stage >= cut else 1) for dtype, cut in held)
    return math.ceil(math.prod(shape_of(value, mesh)) * size)


def moments(optimizer: OptimizerSpec | None) -> int:
    """Running averages that the optimizer keeps of each element."""
    if optimizer is None:
        return 0
    return 2 if optimizer.name == "adamw" else int(bool(optimizer.options.get("momentum")))
