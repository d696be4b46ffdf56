"""Paired measurement: sides take turns step by step in one launch, so that what else the machine does hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from runtime.factory import build
from runtime.initial import initial_state
from runtime.program import Program

Batch = Mapping[str, torch.Tensor]
WARM_UP = 2  # turns that do not count


@dataclass(frozen=True)
class Paired:
    """Of each side, by turn: seconds, processor seconds of this process, and losses, warm-up included."""

    times: dict[str, list[float]]
    work: dict[str, list[float]]
    losses: dict[str, list[float]]

    def median(self, side: str) -> float:
        """Milliseconds of a step."""
        return statistics.median(self.times[side][WARM_UP:]) * 1e3

    def ratio(self, side: str, other: str, work: bool = False) -> float:
        """The median ratio of paired times; `work`: of processor time."""
        each = self.work if work else self.times
        return statistics.median(a / b for a, b in zip(each[side][WARM_UP:], each[other][WARM_UP:]))

    def apart(self, side: str, other: str) -> float:
        """The largest relative difference of the losses."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses[side], self.losses[other]))

    def show(self, side: str, other: str) -> None:
        """Print the medians of the two, and how far their losses are apart."""
        for name in (side, other):
            print(f"  {name}: median {self.median(name):.1f} ms")
        print(f"  largest relative difference of the losses: {self.apart(side, other):.1e}")


def alternate(steps: Mapping[str, Callable[[Batch], float]], batches: Sequence[Batch], rounds: int) -> Paired:
    """`rounds` turns of each step on the same batches, behind the warm-up; which side goes first alternates too.
    Collective: a turn begins and ends with a barrier."""
    found = Paired({side: [] for side in steps}, {side: [] for side in steps}, {side: [] for side in steps})
    for turn in range(rounds + WARM_UP):
        for side in list(steps) if turn % 2 else list(steps)[::-1]:
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            found.losses[side].append(steps[side](batches[turn % len(batches)]))
            dist.barrier()
            found.times[side].append(time.perf_counter() - start)
            found.work[side].append(time.process_time() - used)
    return found


def eager_model(program: Program) -> nn.Module:
    """The program's model in eager torch, with the values that planc begins with."""
    model = build(program.model["factory"], program.model["options"], program.model.get("base"))
    model.load_state_dict(initial_state(program, 0), strict=False)
    return model


def random_batches(program: Program, count: int = 4) -> list[dict[str, torch.Tensor]]:
    return [random_batch(program, seed) for seed in range(count)]


def random_batch(program: Program, seed: int) -> dict[str, torch.Tensor]:
    """Integers in the ranges that the model allows."""
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randint(0, s.below or 2, s.shape, generator=generator) for s in program.inputs}
