"""Loads: the calls of a program as a pipeline sees them, and what a run of them costs a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from compiler.analysis.cost import Cost, KindCost, costs
from compiler.analysis.machine import Machine

if TYPE_CHECKING:
    from compiler.link import Kind
    from compiler.segments.split import Segment
    from runtime.program import Call


@dataclass(frozen=True)
class Load:
    """A call: the unit that its segment was cut for, the modules that it runs in order, what it costs, and the slots
    that its backward reads again."""

    call: Call
    unit: str
    modules: tuple[str, ...]
    cost: KindCost
    needed: frozenset[str]

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(ref.removeprefix("param:") for ref in self.call.arguments if ref.startswith("param:"))

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that it reads."""
        return tuple(reference for reference in self.call.arguments if ":" not in reference)


def loads(
    segments: Sequence[Segment], calls: Sequence[Call], kinds: Mapping[str, Kind], machine: Machine
) -> list[Load]:
    """The loads of a program's calls, in their order; the time of each kind's code is that on the machine."""
    cost = {name: costs(kind, machine) for name, kind in kinds.items()}
    found = []
    for segment, call in zip(segments, calls, strict=True):
        read = (call.arguments[k] for k in kinds[call.kind].code.needed)
        modules = dict.fromkeys(node.origin.module for node in segment.nodes if node.origin.module)
        needed = frozenset(reference for reference in read if ":" not in reference)
        found.append(Load(call, segment.unit, tuple(modules), cost[call.kind], needed))
    return found


NOTHING = Cost()


@dataclass(frozen=True)
class Run:
    """What consecutive calls cost a stage. For each micro-batch: time and operations, bytes that stay for the backward,
    bytes that live only while one of the calls runs, bytes received from earlier stages, and bytes of gradients given back
    to them. All step long: bytes of parameters and their state."""

    forward: Cost = NOTHING
    input: Cost = NOTHING
    weight: Cost = NOTHING
    activation: int = 0
    transient: int = 0
    received: int = 0
    returned: int = 0
    state: int = 0
    parameters: frozenset[str] = frozenset()
    replicas: frozenset[str] = frozenset()

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.input.seconds + self.weight.seconds

    @property
    def exchanged(self) -> int:
        """Bytes that pass between it and earlier stages."""
        return self.received + self.returned

    @property
    def flops(self) -> int:
        return self.forward.flops + self.input.flops + self.weight.flops


@dataclass
class Runs:
    """All runs of the calls `loads`. Beside them, `replicas` are calls that each stage runs which needs their results;
    `state` has the bytes that a rank holds of a parameter, with its gradient and the optimizer's state."""

    loads: Sequence[Load]
    replicas: Mapping[str, Load]
    state: Mapping[str, int]
    _runs: dict[int, list[Run]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        everything = [*self.loads, *self.replicas.values()]
        self.size = {s: n for load in everything for s, n in zip(load.call.results, load.cost.result_bytes)}
        self.copied = {slot: load for load in self.replicas.values() for slot in load.call.results}

    def __call__(self, first: int, end: int) -> Run:
        """Of the calls first … end-1."""
        if first not in self._runs:
            self._runs[first] = list(self._from(first))
        return self._runs[first][end - first - 1]

    def _from(self, first: int) -> list[Run]:
        found: list[Run] = []
        run = Run()
        made: set[str] = set()
        received: set[str] = set()
        returned: set[str] = set()
        held: set[str] = set()
        for load in self.loads[first:]:
            cost = load.cost
            copies = [copy for copy in self.copies(load) if copy.name not in run.replicas]
            foreign = set(load.slots) - made - self.copied.keys()
            back = foreign.intersection(load.call.gradients)
            run = replace(
                run,
                forward=sum((copy.cost.forward for copy in copies), run.forward + cost.forward),
                input=run.input + cost.input,
                weight=run.weight + cost.weight,
                activation=run.activation + cost.saved_bytes + sum(self.size[slot] for slot in load.needed - held),
                transient=max(run.transient, cost.transient_bytes),
                received=run.received + sum(self.size[slot] for slot in foreign - received),
                returned=run.returned + sum(self.size[slot] for slot in back - returned),
                state=run.state + sum(self.state[name] for name in set(load.parameters) - run.parameters),
                parameters=run.parameters.union(load.parameters),
                replicas=run.replicas.union(copy.name for copy in copies),
            )
            made.update(load.call.results)
            received |= foreign
            returned |= back
            held |= load.needed
            found.append(run)
        return found

    def copies(self, load: Load) -> list[Load]:
        """The replicas that a call needs, and those that they need."""
        found: dict[str, Load] = {}
        open_loads = [load]
        while open_loads:
            for slot in open_loads.pop().slots:
                copy = self.copied.get(slot)
                if copy is not None and copy.name not in found:
                    found[copy.name] = copy
                    open_loads.append(copy)
        return list(found.values())
