"""The time reader: how long a step takes on the plan's cluster, and what it spends the time on.

The events of a dry run are played on a model of the machine (`compiler.analysis.machine`): operators one after the
other, each as long as the roofline says; communication beside them, one stream for each set of mesh axes (as NCCL has
one for each communicator) and for each direction of messages, as long as α and β say. A rank stands still where it
waits for a communication that has not ended: that time is *exposed*. Collectives start when all their members are
there, so the stages of a pipeline are played together, one rank of each.

Kernels reach no peak and launches take time, so a step takes longer than this; ratios between plans are what it is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from compiler.analysis.dry_run import DryRun, Step
from compiler.analysis.events import Communicate, Compute, Event, Wait
from compiler.analysis.flops import flops
from compiler.analysis.machine import Machine
from compiler.ir.graph import Graph, Value
from runtime.instructions import Instruction


@dataclass(frozen=True)
class Span:
    """An instruction, from `start` to `end` in seconds from the start of the step."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class StageTime:
    """One stage's step. Seconds: until it is done; of computation; exposed, by the axes that it communicated over; and
    in which it waited for other stages. `flops` by dtype are those that a rank executes, recomputation included."""

    stage: int
    seconds: float
    compute: float
    exposed: Mapping[tuple[str, ...], float]
    waiting: float
    flops: Mapping[str, int]
    spans: Sequence[Span]


@dataclass(frozen=True)
class StepTime:
    """A step of all stages. `model_flops`: of the whole model on the whole batch, without recomputation."""

    stages: tuple[StageTime, ...]
    model_flops: int

    @property
    def seconds(self) -> float:
        return max(stage.seconds for stage in self.stages)

    @property
    def bubble(self) -> float:
        """What the step takes longer than its busiest stage is busy, as a fraction of that."""
        busy = max(stage.seconds - stage.waiting for stage in self.stages)
        return self.seconds / busy - 1 if busy else 0.0

    @cached_property
    def dtype(self) -> str:
        """The dtype of most of the arithmetic."""
        total: Counter[str] = Counter()
        for stage in self.stages:
            total.update(stage.flops)
        return max(total, key=total.__getitem__, default="float32")

    def mfu(self, machine: Machine, ranks: int) -> float:
        """Model FLOPs utilization: of all devices' peak, what the model needs (Chowdhery et al. 2022,
        https://arxiv.org/abs/2204.02311)."""
        return self.model_flops / (self.seconds * ranks * machine.peak(self.dtype)) if self.seconds else 0.0


@dataclass(eq=False)
class Transfer:
    """A communication among the ranks that are played: what each member brings, and when it ended."""

    members: tuple[int, ...]
    seconds: float
    came: dict[int, float] = field(default_factory=dict)
    behind: list[Transfer] = field(default_factory=list)
    ended: float | None = None

    def end(self) -> float | None:
        """When it ends; None while a member is missing. It begins when all are there and earlier ones are over."""
        if self.ended is None and len(self.came) == len(self.members):
            earlier = [other.end() for other in self.behind]
            if None not in earlier:
                self.ended = max([*self.came.values(), *earlier]) + self.seconds  # type: ignore[type-var]
                self.behind.clear()
        return self.ended


class Player:
    """One rank: its events, and the time."""

    def __init__(self, run: DryRun, network: Network):
        self.run, self.network = run, network
        self.now = self.compute = self.waiting = 0.0
        self.exposed: Counter[tuple[str, ...]] = Counter()
        self.flops: Counter[str] = Counter()
        self.spans: list[Span] = []
        self.under_way: dict[int, tuple[Transfer, tuple[str, ...]]] = {}
        self.play = self.events()
        self.done = False

    def advance(self) -> bool:
        """Go on as far as possible; whether that was anywhere."""
        before = len(self.spans), self.network.arrivals
        self.done = next(self.play, None) is None
        return self.done or (len(self.spans), self.network.arrivals) > before

    def events(self) -> Iterator[Transfer]:
        """Plays the step; yields what it waits for while that cannot end yet."""
        for step in self.run.steps:
            start = self.now
            for item in self.network.items(step):
                if isinstance(item, Work):
                    self.now += item.seconds
                    self.compute += item.seconds
                    self.flops.update(item.flops)
                elif isinstance(item, Communicate):
                    self.under_way[item.number] = self.network.start(self.run.rank, item, self.now), item.axes
                    if not item.asynchronous:
                        yield from self.wait(item.number)
                else:
                    yield from self.wait(item.number)
            self.spans.append(Span(step.instruction, start, self.now))

    def wait(self, number: int) -> Iterator[Transfer]:
        transfer, axes = self.under_way.pop(number)
        while (end := transfer.end()) is None:
            yield transfer
        stood = max(0.0, end - self.now)
        self.now += stood
        if len(transfer.members) > 1:
            self.waiting += stood
        elif stood:
            self.exposed[axes] += stood


@dataclass(frozen=True)
class Work:
    """Operators without communication in between: seconds, and operations by dtype."""

    seconds: float
    flops: Mapping[str, int]


class Network:
    """What the ranks share: the machine, and communications under way."""

    def __init__(self, machine: Machine, ranks: Iterable[int]):
        self.machine, self.ranks = machine, frozenset(ranks)
        self.arrivals = 0
        self._numbers: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._transfers: dict[tuple[tuple[int, ...], int], Transfer] = {}
        self._last: dict[tuple[int, tuple], Transfer] = {}  # type: ignore[type-arg]
        self._items: dict[int, tuple[Sequence[Event], list[Work | Communicate | Wait]]] = {}

    def start(self, rank: int, event: Communicate, now: float) -> Transfer:
        """The communication that a rank joins; members meet in the order of their calls on the group."""
        self.arrivals += 1
        number = self._numbers[rank, event.group] = self._numbers[rank, event.group] + 1
        key = (event.group, number)
        if key not in self._transfers:
            kind = "send" if event.is_message else event.kind
            seconds = self.machine.communication(kind, event.axes, event.full)
            self._transfers[key] = Transfer(tuple(r for r in event.group if r in self.ranks), seconds)
        transfer = self._transfers[key]
        transfer.came[rank] = now
        stream = (rank, event.group if event.is_message else event.axes)
        if stream in self._last:
            transfer.behind.append(self._last[stream])
        self._last[stream] = transfer
        return transfer

    def items(self, step: Step) -> Iterator[Work | Communicate | Wait]:
        """A step's events with neighbouring operators together; chunks that repeat are summed up once."""
        for chunk in step.chunks:
            if id(chunk) not in self._items:
                self._items[id(chunk)] = chunk, list(self.summed(chunk))
            yield from self._items[id(chunk)][1]

    def summed(self, events: Iterable[Event]) -> Iterator[Work | Communicate | Wait]:
        seconds, operations = 0.0, Counter[str]()
        for event in events:
            if isinstance(event, Compute):
                seconds += self.machine.seconds(event.flops, event.bytes, event.dtype)
                operations[event.dtype] += event.flops
            elif isinstance(event, (Communicate, Wait)):
                if seconds:
                    yield Work(seconds, operations)
                    seconds, operations = 0.0, Counter()
                yield event
        if seconds:
            yield Work(seconds, operations)


def read_time(runs: Sequence[DryRun], machine: Machine, model_flops: int) -> StepTime:
    """The time of a step, from a dry run of each stage."""
    network = Network(machine, (run.rank for run in runs))
    players = [Player(run, network) for run in runs]
    while not all(player.done for player in players):
        if not any([player.advance() for player in players if not player.done]):
            stuck = ", ".join(str(p.run.steps[len(p.spans)].instruction) for p in players if not p.done)
            raise AssertionError(f"the stages wait for each other: {stuck}")
    stages = tuple(
        StageTime(p.run.stage, p.now, p.compute, dict(p.exposed), p.waiting, dict(p.flops), p.spans) for p in players
    )
    return StepTime(stages, model_flops)


def model_flops(graph: Graph) -> int:
    """Of a training step of the whole model on the whole batch: an operator's forward, and as much again for the
    gradient of each of its operands, two at most (what an attention recomputes of its scores does not count)."""
    total = 0
    for node in graph.nodes:
        forward = flops(node.op, node.args, node.outputs)
        if forward:
            gradients = sum(isinstance(arg, Value) and arg.differentiable for arg in node.args[:3])
            total += forward * (1 + min(2, gradients))
    return total
