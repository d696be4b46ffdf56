"""A segment's code in a dry run: run once for each distinct situation, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from compiler.analysis.events import Allocate, Event, Release
from compiler.analysis.storage import Storage, StorageTracker
from compiler.autodiff.partition import SegmentCode
from compiler.ir.graph import Node
from runtime.context import TIME, RankContext


@dataclass(frozen=True)
class Made:
    """How to make a tensor again: on the storage of argument `argument`, or on storage `storage` of the code's own."""

    argument: int | None
    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def again(self, memory: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device="meta").set_(memory, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class Recording:
    """One run of a function on stand-ins for its arguments: its events, the bytes of the storages that its results
    need, and the results: how they are made, or themselves if they are None or live on (a cached tensor).

    `given`: storage number of a stand-in → the first argument on it. `chunks`: the events as they are where arguments
    of these categories die in the code, and the others are held elsewhere.
    """

    events: Sequence[Event]
    storages: dict[int, int]
    results: tuple[Made | Tensor | None, ...]
    structure: TreeSpec
    given: dict[int, int]
    chunks: dict[tuple[tuple[int, str], ...], Sequence[Event]] = field(default_factory=dict)

    def chunk(self, arguments: Sequence[Storage | None]) -> Sequence[Event]:
        """The events with these storages for the stand-ins: those that have died do so where the stand-in did."""
        died = {k: s for k in self.given.values() if (s := arguments[k]) is not None and not s.alive}
        # Storages of this very instruction are known by their numbers, others by their category alone.
        shared = all(storage.category is not None for storage in died.values())
        key = tuple((k, storage.category or "") for k, storage in died.items())
        if shared and key in self.chunks:
            return self.chunks[key]
        events: list[Event] = []
        for event in self.events:
            if not isinstance(event, Release) or event.storage not in self.given:
                events.append(event)
            elif (storage := died.get(self.given[event.storage])) is not None:
                events.append(Release(storage.number, storage.bytes, storage.category))
        if shared:
            self.chunks[key] = events
        return events


class ReplayedKind:
    """Stands for a segment's module: for each distinct set of arguments a function runs once to fill caches, once to be
    recorded, and is replayed from then on.

    Code that keeps something behind its results (an opaque module's autograd graph) runs each time.
    """

    def __init__(self, code: SegmentCode, module: ModuleType, tracker: StorageTracker):
        self._module, self._tracker, self._file = module, tracker, module.forward.__code__.co_filename
        nodes = [*code.forward, *code.backward]
        self._repeatable = not any(node.op.startswith("planc.opaque") for node in nodes)
        self._timed = any(mentions_time(node) for node in nodes)
        self._seen: set[Any] = set()
        self._recordings: dict[Any, Recording] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not callable(found):
            return found
        if name == "forward":

            def forward(context: RankContext, *arguments: Any) -> Any:
                return self._run(name, lambda c, given: found(c, *given), context, list(arguments))

            return forward

        def backward(context: RankContext, given: list[Any]) -> Any:
            return self._run(name, found, context, given)

        return backward

    def _run(self, name: str, function: Callable[..., Any], context: RankContext, arguments: list[Any]) -> Any:
        first: dict[int, int] = {}
        situation = (
            name,
            context.coords[TIME] if self._timed else None,
            tuple((tuple(a.shape), a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in arguments),
            tuple(first.setdefault(memory_of(a), k) for k, a in enumerate(arguments)),
            tuple(None if target is None else target[0].dtype for target in context.targets),
        )
        tracker, recording = self._tracker, self._recordings.get(situation)
        if recording is None and situation in self._seen:
            with tracker.aside(None):
                recording = self._recordings[situation] = self._record(function, context, arguments)
        if recording is not None:
            return self._replay(recording, arguments)
        if self._repeatable:
            self._seen.add(situation)
        with tracker.chunk([], self._file):
            return function(context, arguments)

    def _record(self, function: Callable[..., Any], context: RankContext, arguments: Sequence[Any]) -> Recording:
        """Run it on stand-ins of the same shapes, which share storages as the arguments do."""
        tracker = self._tracker
        passed = stand_ins(arguments)
        given: dict[int, int] = {}
        for k in range(len(passed)):
            if without_data(passed[k]):
                given.setdefault(tracker.see(passed[k]).number, k)
        events: list[Event] = []
        with tracker.aside(events, self._file):
            results = function(context, passed)
        leaves, structure = tree_flatten(results)
        new = {event.storage for event in events if isinstance(event, Allocate)}
        storages: dict[int, int] = {}
        found: list[Made | Tensor | None] = []
        for leaf in leaves:
            storage = tracker.see(leaf) if isinstance(leaf, Tensor) else None
            if storage is None:
                found.append(None)
            elif storage.number in given:
                found.append(made_on(leaf, given[storage.number], storage.number))
            elif storage.number in new:
                storages[storage.number] = storage.bytes
                found.append(made_on(leaf, None, storage.number))
            else:
                found.append(leaf)
        return Recording(events, storages, tuple(found), structure, given)

    def _replay(self, recording: Recording, arguments: list[Any]) -> Any:
        """Make the results again, and let go of the arguments as the function does."""
        tracker = self._tracker
        held = [tracker.see(a) if without_data(a) else None for a in arguments]
        with tracker.aside(None):
            memory = {number: tracker.again(number, size) for number, size in recording.storages.items()}
            leaves = []
            for made in recording.results:
                if isinstance(made, Made):
                    own = made.argument is None
                    where = memory[made.storage] if own else arguments[made.argument or 0].untyped_storage()
                    leaves.append(made.again(where))
                else:
                    leaves.append(made)
            arguments.clear()
        tracker.write(recording.chunk(held))
        return tree_unflatten(leaves, recording.structure)


def stand_ins(arguments: Sequence[Any]) -> list[Any]:
    """Tensors of the same shapes on storages of their own, which they share as the arguments do theirs."""
    fresh: dict[int, torch.UntypedStorage] = {}
    found = []
    for argument in arguments:
        if without_data(argument):
            size = argument.untyped_storage().nbytes()
            memory = fresh.setdefault(memory_of(argument), torch.UntypedStorage(size, device="meta"))
            argument = made_on(argument, None, 0).again(memory)
        found.append(argument)
    return found


def without_data(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.device.type == "meta"


def memory_of(argument: Any) -> int:
    """What tells apart the memory of arguments."""
    return argument.untyped_storage()._cdata if isinstance(argument, Tensor) else id(argument)


def made_on(tensor: Tensor, argument: int | None, storage: int) -> Made:
    """How `tensor` is made again."""
    layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    return Made(argument, storage, tensor.dtype, *layout)


def mentions_time(node: Node) -> bool:
    """Whether what a node does may depend on the micro-batch: time is one of its axes."""
    return any(TIME in text for text in texts((node.args, node.kwargs)))


def texts(argument: Any) -> Iterable[str]:
    if isinstance(argument, str):
        yield argument
    elif isinstance(argument, dict):
        yield from texts(tuple(argument.values()))
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from texts(item)
