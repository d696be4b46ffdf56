"""All ranks in one process, one thread each: simulation, debugging and tests without devices or sockets.

Deterministic: reductions run in group order, and a result becomes visible only in the member's own wait, so a program
that forgets a wait sees old data every time. Checked: members must agree on each call; an input written while its
communication is in flight is an error.

What threads share and what they do not, in torch: the default dtype, the default generator and the number of threads
are global; grad mode, autocast and the default device are thread-local and start at their defaults in each rank, so
enter `torch.no_grad()` or `torch.device(...)` inside the function given to `run_ranks`.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from runtime.transport.base import Group, Transport, Work
from runtime.transport.calls import Call
from runtime.transport.errors import RankFailure, TransportError
from runtime.transport.reduction import reduce_terms
from runtime.transport.world import Arrival, Slot, World

T = TypeVar("T")


class InProcessTransport(Transport):
    """One rank of a `World`; used by one thread."""

    backend = "in_process"

    def __init__(self, world: World, rank: int, device: torch.device | str = "cpu") -> None:
        super().__init__(rank, world.size, torch.device(device), world.timeout)
        self._world = world
        self._everyone = tuple(range(world.size))
        self._numbers: Counter[Hashable] = Counter()
        world.watch(rank, lambda: self.doing)

    def prepare(self, groups: Iterable[Group]) -> None:
        """Groups need no preparation here, but the ranks must agree on them as everywhere."""
        self._agree([tuple(group) for group in groups])

    def barrier(self, label: str | None = None) -> None:
        self._control("barrier", None, label)

    def gather_objects(self, obj: Any) -> list[Any]:
        texts = self._control("gather_objects", json.dumps(obj), None)
        return [json.loads(text) for text in texts]

    def claims(self) -> bool:
        return self._world.failure is None

    def abort(self, reason: str) -> None:
        self._world.fail(self.rank, TransportError(reason), self.doing)

    def close(self) -> None:
        return

    def _control(self, kind: str, payload: str | None, label: str | None) -> list[str]:
        call = Call(kind, self._everyone, label=label)
        work = self._start(call, Arrival(call, payload=payload), lambda arrivals: [a.payload for a in arrivals])
        return cast("list[str]", work.result())

    def _all_reduce(self, call: Call, tensor: Tensor) -> Work:
        return self._start(call, Arrival(call, tensor), _reduced, lambda result: tensor.copy_(result))

    def _all_gather(self, call: Call, out: Tensor, tensor: Tensor) -> Work:
        return self._start(call, Arrival(call, tensor), _stacked, lambda result: out.view(-1).copy_(result.view(-1)))

    def _reduce_scatter(self, call: Call, out: Tensor, tensor: Tensor) -> Work:
        mine = call.group.index(self.rank)
        parts = len(call.group)
        return self._start(
            call, Arrival(call, tensor), _reduced, lambda result: out.view(-1).copy_(result.view(parts, -1)[mine])
        )

    def _all_to_all(self, call: Call, out: Tensor, tensor: Tensor) -> Work:
        mine = call.group.index(self.rank)
        parts = len(call.group)
        return self._start(
            call,
            Arrival(call, tensor),
            _stacked,
            lambda result: out.view(parts, -1).copy_(result.view(parts, parts, -1)[:, mine]),
        )

    def _broadcast(self, call: Call, tensor: Tensor) -> Work:
        source = self.rank == call.source
        return self._start(
            call,
            Arrival(call, tensor if source else None),
            _only,
            None if source else (lambda result: tensor.copy_(result)),
        )

    def _send(self, call: Call, tensor: Tensor) -> Work:
        return self._start(call, Arrival(call, tensor), _only)

    def _recv(self, call: Call, tensor: Tensor) -> Work:
        return self._start(call, Arrival(call), _only, lambda result: tensor.copy_(result))

    def _start(
        self,
        call: Call,
        arrival: Arrival,
        combine: Callable[[list[Arrival]], object],
        deliver: Callable[[Tensor], object] | None = None,
    ) -> InProcessWork:
        # Messages of one ordered pair are one stream whatever their tags: that is how NCCL matches them.
        stream = ("message", call.group) if call.kind in ("send", "recv") else call.group
        self._numbers[stream] += 1
        snapshot = None
        if call.asynchronous and arrival.tensor is not None:
            snapshot = (arrival.tensor, arrival.tensor.clone())
            arrival.tensor = snapshot[1]
        slot = self._world.arrive(self.rank, call.group, stream, self._numbers[stream], arrival, combine)
        return InProcessWork(self._world, self.rank, slot, call, deliver, snapshot)


class InProcessWork(Work):
    """snapshot: the caller's input and a copy of it, of an asynchronous call."""

    def __init__(
        self,
        world: World,
        rank: int,
        slot: Slot,
        call: Call,
        deliver: Callable[[Tensor], object] | None,
        snapshot: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._world = world
        self._rank = rank
        self._slot = slot
        self._call = call
        self._deliver = deliver
        self._snapshot = snapshot

    def wait(self) -> None:
        result = self.result()
        if self._snapshot is not None:
            live, copy = self._snapshot
            if not torch.equal(live.view(-1).view(torch.uint8), copy.view(-1).view(torch.uint8)):
                raise TransportError(f"rank {self._rank} wrote to the input of {self._call} before waiting for it")
            self._snapshot = None
        if self._deliver is not None:
            with torch.no_grad():
                self._deliver(cast(Tensor, result))
            self._deliver = None

    def result(self) -> object:
        return self._world.wait(self._rank, self._slot, self._call)


def _tensors(arrivals: list[Arrival]) -> list[Tensor]:
    return [arrival.tensor for arrival in arrivals if arrival.tensor is not None]


def _reduced(arrivals: list[Arrival]) -> Tensor:
    terms = _tensors(arrivals)
    result = torch.empty_like(terms[0])
    reduce_terms(terms, arrivals[0].call.op or "sum", result)
    return result


def _stacked(arrivals: list[Arrival]) -> Tensor:
    """[members, ...]: a copy, because a member may write to its tensor once its own wait has returned."""
    return torch.stack(_tensors(arrivals))


def _only(arrivals: list[Arrival]) -> Tensor:
    """A copy of the one tensor given: the source's, or the sender's."""
    (tensor,) = _tensors(arrivals)
    return tensor.clone()


def run_ranks(
    size: int,
    fn: Callable[[InProcessTransport], T],
    timeout: float | None = 60.0,
    device: torch.device | str = "cpu",
    grace: float = 5.0,
) -> list[T]:
    """Run `fn(transport)` as each of `size` ranks, one thread each; the results by rank.

    timeout: the bound of each wait in seconds (None: no bound, for breakpoints). The first failure releases all ranks
    and is raised as RankFailure from the rank's own exception; a rank that computes on for more than `grace` seconds
    after it is left behind in its daemon thread and named in the error's notes. torch runs one intra-op thread per rank
    meanwhile.
    """
    world = World(size, timeout)
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        torch.set_num_threads(1)  # Each thread would otherwise start an OpenMP pool of its own.
        transport = InProcessTransport(world, rank, device)
        try:
            results[rank] = fn(transport)
        except BaseException as error:
            world.fail(rank, error, transport.doing)
        finally:
            world.finish(rank)

    threads_before = torch.get_num_threads()
    threads = [threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True) for r in range(size)]
    try:
        for thread in threads:
            thread.start()
        world.join(None)
    except BaseException as error:  # Ctrl-C in the caller: release the ranks before leaving.
        world.fail(0, error, "run_ranks")
        raise
    finally:
        everyone_ended = world.join_all(grace)
        torch.set_num_threads(threads_before)
    if world.failure is not None:
        failure = RankFailure(world.failure.rank, world.failure.label, world.failure.cause)
        if not everyone_ended:
            failure.add_note(f"still computing after {grace:g} s, and left behind: ranks {world.unfinished()}")
        raise failure from world.failure.cause
    return results
