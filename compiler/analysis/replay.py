"""A segment's code in a dry run: run once for each distinct situation, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from compiler.analysis.events import Allocate, Event
from compiler.analysis.storage import StorageTracker
from compiler.autodiff.partition import SegmentCode
from compiler.ir.graph import Node
from runtime.context import TIME, RankContext


@dataclass(frozen=True)
class Made:
    """How to make a result again: on the storage of argument `argument`, or on storage `storage` of the code's own."""

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
    """One run of a function: its events, the bytes of the storages that its results need, and the results: how they are
    made, or themselves if they are None or live on (a cached tensor)."""

    events: Sequence[Event]
    storages: dict[int, int]
    results: tuple[Made | Tensor | None, ...]
    structure: TreeSpec


class ReplayedKind:
    """Stands for a segment's module: for each distinct set of arguments a function runs once to fill caches, once to be
    recorded, and is replayed from then on.

    Code that keeps something behind its results (an opaque module's autograd graph) runs each time.
    """

    def __init__(self, code: SegmentCode, module: ModuleType, tracker: StorageTracker):
        self._module, self._tracker = module, tracker
        nodes = [*code.forward, *code.backward]
        self._repeatable = not any(node.op.startswith("planc.opaque") for node in nodes)
        self._timed = any(mentions_time(node) for node in nodes)
        self._seen: set[Any] = set()
        self._recordings: dict[Any, Recording] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not callable(found):
            return found

        def run(context: RankContext, *arguments: Any) -> Any:
            return self._run(name, found, context, arguments)

        return run

    def _run(self, name: str, function: Callable[..., Any], context: RankContext, arguments: tuple[Any, ...]) -> Any:
        situation = (
            name,
            context.coords[TIME] if self._timed else None,
            tuple((tuple(a.shape), a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in arguments),
            tuple(None if target is None else target[0].dtype for target in context.targets),
        )
        recording = self._recordings.get(situation)
        if recording is not None:
            return self._replay(recording, arguments)
        events: list[Event] = []
        with self._tracker.chunk(events, function.__code__.co_filename):
            results = function(context, *arguments)
        if situation in self._seen:
            self._recordings[situation] = self._recorded(events, results, arguments)
        elif self._repeatable:
            self._seen.add(situation)
        return results

    def _recorded(self, events: list[Event], results: Any, arguments: tuple[Any, ...]) -> Recording:
        leaves, structure = tree_flatten(results)
        given = {a.untyped_storage()._cdata: k for k, a in enumerate(arguments) if isinstance(a, Tensor)}
        new = {event.storage for event in events if isinstance(event, Allocate)}
        storages: dict[int, int] = {}
        found: list[Made | Tensor | None] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                found.append(None)
                continue
            argument, storage = given.get(leaf.untyped_storage()._cdata), self._tracker.see(leaf)
            if argument is None and storage.number not in new:
                found.append(leaf)
                continue
            if argument is None:
                storages[storage.number] = storage.bytes
            layout = (tuple(leaf.shape), leaf.stride(), leaf.storage_offset())
            found.append(Made(argument, storage.number, leaf.dtype, *layout))
        return Recording(tuple(events), storages, tuple(found), structure)

    def _replay(self, recording: Recording, arguments: tuple[Any, ...]) -> Any:
        with self._tracker.repeated(recording.events):
            memory = {number: self._tracker.again(number, size) for number, size in recording.storages.items()}
            leaves = []
            for made in recording.results:
                if isinstance(made, Made):
                    own = made.argument is None
                    where = memory[made.storage] if own else arguments[made.argument or 0].untyped_storage()
                    leaves.append(made.again(where))
                else:
                    leaves.append(made)
        return tree_unflatten(leaves, recording.structure)


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
