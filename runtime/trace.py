"""Traces: when each rank ran each instruction, as a Chrome trace (chrome://tracing, https://ui.perfetto.dev).

A rank is a process of the picture, with a lane for computation, one for communication and one for the rest. Events have
the pipeline stage, the micro-batch and the step as arguments. On CUDA the times are those of the device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from runtime.instructions import Instruction
from runtime.session import Session

COMPUTE = ("prologue", "forward", "backward", "backward_input", "backward_weight")
COMMUNICATE = ("gather", "reduce", "reduce_across", "send", "recv", "wait", "load", "unload", "store", "finite", "report")
LANES = ("computation", "communication", "optimizer")


@dataclass(frozen=True)
class Event:
    """An instruction on a rank, in a step counted from 1; `start` and `end` in seconds of the wall clock."""

    rank: int
    stage: int
    step: int
    instruction: str
    op: str
    micro: int | None
    start: float
    end: float

    @property
    def lane(self) -> int:
        return 0 if self.op in COMPUTE else 1 if self.op in COMMUNICATE else 2


class Tracer:
    """Records a session's instructions while it is entered."""

    def __init__(self, session: Session):
        self.session = session
        self.events: list[Event] = []
        self._marks: list[tuple[Instruction, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._cuda = session.transport.device.type == "cuda"

    def __enter__(self) -> Tracer:
        executor = self.session.executor
        self._actions = executor.actions
        executor.actions = {op: self._recorded(action) for op, action in self._actions.items()}
        if self._cuda:
            torch.cuda.synchronize()
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
        self._began = time.time()
        return self

    def __exit__(self, *details: object) -> None:
        self.session.executor.actions = self._actions
        if self._cuda:
            torch.cuda.synchronize()
            for instruction, step, start, end in self._marks:
                times = (self._began + self._origin.elapsed_time(mark) / 1e3 for mark in (start, end))
                self._add(instruction, step, *times)

    def _recorded(self, action: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
        def run(instruction: Instruction) -> None:
            if self._cuda:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                action(instruction)
                end.record()
                self._marks.append((instruction, self.session.executor.number, start, end))
            else:
                began = time.time()
                action(instruction)
                self._add(instruction, self.session.executor.number, began, time.time())

        return run

    def _add(self, instruction: Instruction, step: int, start: float, end: float) -> None:
        rank, stage = self.session.transport.rank, self.session.state.stage
        op = instruction.op
        self.events.append(Event(rank, stage, step, str(instruction), op, instruction.micro, start, end))

    def gathered(self) -> list[Event]:
        """The events of all ranks, on all ranks. Collective."""
        everyone = self.session.transport.gather_objects([asdict(event) for event in self.events])
        return [Event(**event) for events in everyone for event in events]


def write_trace(events: Iterable[Event], path: Path, ranks: dict[int, str]) -> None:
    """Write a Chrome trace. `ranks` are their names."""
    found = list(events)
    origin = min((event.start for event in found), default=0.0)
    entries: list[dict[str, object]] = []
    for rank, name in ranks.items():
        entries.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": name}})
        entries += [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": lane, "args": {"name": title}}
            for lane, title in enumerate(LANES)
        ]
    entries += [
        {
            "name": event.instruction,
            "cat": event.op,
            "ph": "X",
            "ts": (event.start - origin) * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "pid": event.rank,
            "tid": event.lane,
            "args": {"stage": event.stage, "micro-batch": event.micro, "step": event.step},
        }
        for event in found
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}))


def measured_bubble(events: Iterable[Event]) -> float:
    """How much longer the traced steps took than their busiest rank computed, as a fraction of that."""
    found = [event for event in events if event.op in COMPUTE]
    total = busy = 0.0
    for step in {event.step for event in found}:
        own = [event for event in found if event.step == step]
        by_rank: dict[int, float] = {}
        for event in own:
            by_rank[event.rank] = by_rank.get(event.rank, 0.0) + event.end - event.start
        busy += max(by_rank.values())
        total += max(event.end for event in own) - min(event.start for event in own)
    return total / busy - 1 if busy else 0.0
