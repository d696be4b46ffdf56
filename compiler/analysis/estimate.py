"""What a plan needs and takes, without running it: memory, traffic and time together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiler.analysis.dry_run import DryRun, dry_run
from compiler.analysis.machine import Machine, machine
from compiler.analysis.memory import Memory, read_memory
from compiler.analysis.time import StepTime, model_flops, read_time
from compiler.analysis.traffic import Traffic, read_traffic
from compiler.layout.placement import Mesh

if TYPE_CHECKING:
    from compiler.driver import Compilation


@dataclass(frozen=True)
class Estimate:
    """Of each pipeline stage the memory and the traffic of one rank, and the time of a step of all."""

    machine: Machine
    runs: Sequence[DryRun]
    memory: Sequence[Memory]
    traffic: Sequence[Traffic]
    time: StepTime
    ranks: int
    rows: int
    tokens: int

    @property
    def fullest(self) -> Memory:
        """The stage that needs the most memory."""
        return max(self.memory, key=lambda memory: memory.peak.bytes)

    @property
    def fits(self) -> bool:
        return self.fullest.peak.bytes <= self.machine.device.memory

    @property
    def mfu(self) -> float:
        return self.time.mfu(self.machine, self.ranks)


def estimate(compilation: Compilation) -> Estimate:
    """A dry run of a rank of each stage, read three ways."""
    program, plan = compilation.program, compilation.plan
    runs = [dry_run(compilation, stage) for stage in range(len(program.streams))]
    device = machine(plan, Mesh(tuple(program.mesh.items())))
    return Estimate(
        device,
        runs,
        [read_memory(run) for run in runs],
        [read_traffic(run) for run in runs],
        read_time(runs, device, model_flops(compilation.captured.graph)),
        program.world,
        program.rows,
        tokens(compilation),
    )


def tokens(compilation: Compilation) -> int:
    """Tokens in a batch: the elements of the first input of rows of integers; 0 if there is none."""
    return next(
        (
            math.prod(spec.shape)
            for spec in compilation.program.inputs
            if len(spec.shape) == 2 and spec.dtype in ("int64", "int32")
        ),
        0,
    )
