"""The interface between a rank's program and its peers.

`Transport` checks arguments, counts traffic and treats groups of one in a single place; a backend only moves data.
Groups are tuples of *global* ranks, in order; position in the tuple is the index in gathered results.
"""

from __future__ import annotations

import hashlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from runtime.transport.calls import Call, Counters
from runtime.transport.errors import TransportError
from runtime.transport.reduction import check_reduction

Group = tuple[int, ...]


class Work(ABC):
    """A communication under way.

    Until `wait` returns, inputs must not be written and outputs not be read. `wait` may be called more than once.
    """

    @abstractmethod
    def wait(self) -> None:
        """Block until the result is there (on CUDA: order the current stream behind it).

        Raises WaitTimeout, CollectiveMismatch, PeerFailure or Deadlock.
        """


class Finished(Work):
    """Work that needed no communication."""

    def wait(self) -> None:
        return


class Transport(ABC):
    """Communication of one rank with the others.

    rank, size: this rank and the number of ranks.
    device: where this rank's tensors live. backend: "nccl", "gloo", "in_process" or "local".
    timeout: the bound of every wait, in seconds; None for no bound.
    host: a name of the machine that this rank is on.
    counters: calls and bytes since the start. doing: what this rank does now, for the error messages of its peers.

    Every call takes a `label` ("reduce bucket 3 (step 7)") that appears in errors. With `wait=False` a call returns at
    once, and the result exists after `Work.wait`. All tensors must be contiguous; none is differentiated through.
    Calls with a group of one copy at most and communicate nothing.

    All members of a group must issue their calls on it in the same order; so must the two ends of a message stream
    (NCCL ignores tags and matches by order, so the in-process transport checks that both agree).
    """

    backend: str

    def __init__(self, rank: int, size: int, device: torch.device, timeout: float | None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout = timeout
        self.host = socket.gethostname()
        self.counters = Counters()
        self.doing: str | None = None

    def describe(self, label: str | None) -> None:
        """Say what this rank is about to do, for peers that wait for it in vain."""
        self.doing = label

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Tensor, group: Group, op: str = "sum", wait: bool = True, label: str | None = None
    ) -> Work:
        """Replace `tensor`, of one shape on every member, by its reduction ("sum", "avg", "max", "min"; bool: "and",
        "or", "max", "min")."""
        check_reduction(op, tensor.dtype)
        call = self._call("all_reduce", group, tensor, wait, label, op=op)
        if len(group) == 1:
            return Finished()
        self._count(call, tensor)
        return self._ended(self._all_reduce(call, tensor.detach()), wait)

    def all_gather(
        self, out: Tensor, tensor: Tensor, group: Group, wait: bool = True, label: str | None = None
    ) -> Work:
        """Concatenate the members' `tensor`s on dim 0 into `out` (n times as many elements).

        `tensor` may be this rank's own part of `out`: then it is not copied.
        """
        self._check_sizes("all_gather", out, tensor, len(group), 1)
        call = self._call("all_gather", group, tensor, wait, label)
        if len(group) == 1:
            return _copied(out, tensor)
        self._count(call, out)
        return self._ended(self._all_gather(call, out.detach(), tensor.detach()), wait)

    def reduce_scatter(
        self, out: Tensor, tensor: Tensor, group: Group, op: str = "sum", wait: bool = True, label: str | None = None
    ) -> Work:
        """Reduce `tensor` over the members and write this rank's part (cut on dim 0 in n equal ones) into `out`.

        `out` may be this rank's own part of `tensor`; otherwise `tensor` keeps its content.
        """
        check_reduction(op, tensor.dtype)
        self._check_sizes("reduce_scatter", out, tensor, 1, len(group))
        call = self._call("reduce_scatter", group, tensor, wait, label, op=op)
        if len(group) == 1:
            return _copied(out, tensor)
        self._count(call, tensor)
        return self._ended(self._reduce_scatter(call, out.detach(), tensor.detach()), wait)

    def all_to_all(
        self, out: Tensor, tensor: Tensor, group: Group, wait: bool = True, label: str | None = None
    ) -> Work:
        """Cut `tensor` on dim 0 in n equal parts, send part i to member i, concatenate what arrives into `out`."""
        self._check_sizes("all_to_all", out, tensor, 1, 1)
        call = self._call("all_to_all", group, tensor, wait, label)
        if tensor.numel() % len(group):
            raise TransportError(f"{call}: {tensor.numel()} elements cannot be cut in {len(group)} equal parts")
        if len(group) == 1:
            return _copied(out, tensor)
        self._count(call, tensor)
        return self._ended(self._all_to_all(call, out.detach(), tensor.detach()), wait)

    def broadcast(self, tensor: Tensor, group: Group, source: int, wait: bool = True, label: str | None = None) -> Work:
        """Replace `tensor` by that of `source`, a global rank of the group."""
        call = self._call("broadcast", group, tensor, wait, label, source=source)
        if source not in group:
            raise TransportError(f"{call}: rank {source} is not in the group {group}")
        if len(group) == 1:
            return Finished()
        self._count(call, tensor)
        return self._ended(self._broadcast(call, tensor.detach()), wait)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int = 0, wait: bool = True, label: str | None = None) -> Work:
        """Send to global rank `to`, which must receive; a wait may last until it does."""
        call = self._call("send", (self.rank, to), tensor, wait, label, tag=tag)
        self._count(call, tensor)
        return self._ended(self._send(call, tensor.detach()), wait)

    def recv(self, tensor: Tensor, source: int, tag: int = 0, wait: bool = True, label: str | None = None) -> Work:
        """Receive from global rank `source` into `tensor`, which has the sender's shape and dtype."""
        call = self._call("recv", (source, self.rank), tensor, wait, label, tag=tag)
        self._count(call, tensor)
        return self._ended(self._recv(call, tensor.detach()), wait)

    # -- control -------------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, groups: Iterable[Group]) -> None:
        """Create the groups that will be used. Collective: every rank passes the same list, in the same order."""

    @abstractmethod
    def barrier(self, label: str | None = None) -> None:
        """Wait for every rank."""

    @abstractmethod
    def gather_objects(self, obj: Any) -> list[Any]:
        """Every rank's small, JSON-able `obj`, by rank, on every rank. Collective."""

    def claims(self) -> bool:
        """Whether this rank, which is about to `abort`, is the first of all to fail: it has the word until it does."""
        return True

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Tell the other ranks that this one fails, and why. The first report of a job is the one they name."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Not collective; may be called twice."""

    # -- for backends --------------------------------------------------------------------------------------------

    @abstractmethod
    def _all_reduce(self, call: Call, tensor: Tensor, /) -> Work: ...

    @abstractmethod
    def _all_gather(self, call: Call, out: Tensor, tensor: Tensor, /) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, call: Call, out: Tensor, tensor: Tensor, /) -> Work: ...

    @abstractmethod
    def _all_to_all(self, call: Call, out: Tensor, tensor: Tensor, /) -> Work: ...

    @abstractmethod
    def _broadcast(self, call: Call, tensor: Tensor, /) -> Work: ...

    @abstractmethod
    def _send(self, call: Call, tensor: Tensor, /) -> Work: ...

    @abstractmethod
    def _recv(self, call: Call, tensor: Tensor, /) -> Work: ...

    def _agree(self, groups: list[Group]) -> None:
        """Raise TransportError unless the groups are possible and every rank has the same list. Collective."""
        for group in groups:
            if not group or list(group) != sorted(set(group)) or not 0 <= group[0] <= group[-1] < self.size:
                raise TransportError(f"a group lists distinct ranks below {self.size} in ascending order, not {group}")
        digests = self.gather_objects(hashlib.sha256(repr(groups).encode()).hexdigest())
        for rank, digest in enumerate(digests):
            if digest != digests[self.rank]:
                raise TransportError(f"ranks {self.rank} and {rank} prepare different groups; here: {groups}")

    def _call(
        self,
        kind: str,
        group: Group,
        tensor: Tensor,
        wait: bool,
        label: str | None,
        *,
        op: str | None = None,
        source: int | None = None,
        tag: int | None = None,
    ) -> Call:
        call = Call(kind, group, tuple(tensor.shape), tensor.dtype, op, source, tag, label, not wait)
        if label is not None:
            self.doing = label
        if self.rank not in group:
            raise TransportError(f"{call}: rank {self.rank} is not in the group {group}")
        if tag is not None and (group[0] == group[1] or not all(0 <= rank < self.size for rank in group)):
            raise TransportError(f"{call}: the other end must be another rank below {self.size}")
        if not tensor.is_contiguous():
            raise TransportError(f"{call}: the tensor is not contiguous (strides {tensor.stride()})")
        return call

    @staticmethod
    def _check_sizes(kind: str, out: Tensor, tensor: Tensor, out_parts: int, in_parts: int) -> None:
        if out.dtype != tensor.dtype or out.numel() * in_parts != tensor.numel() * out_parts or not out.is_contiguous():
            raise TransportError(
                f"{kind}: the output must be contiguous, of dtype {tensor.dtype} and "
                f"{tensor.numel() * out_parts / in_parts:g} elements; it is {out.dtype}, {tuple(out.shape)}"
            )

    def _count(self, call: Call, full: Tensor) -> None:
        self.counters.add(call.kind, call.group, full.numel() * full.element_size())

    @staticmethod
    def _ended(work: Work, wait: bool) -> Work:
        if wait:
            work.wait()
        return work


def _copied(out: Tensor, tensor: Tensor) -> Work:
    """What a group of one does; nothing if both are the same memory."""
    if out.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            out.view(-1).copy_(tensor.view(-1))
    return Finished()
