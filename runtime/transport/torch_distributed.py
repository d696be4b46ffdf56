"""Ranks as processes, over torch.distributed: NCCL on CUDA, gloo on CPU.

On gloo, all-gather and reduce-scatter are built from point-to-point messages: gloo's own reduce-scatter is an
all-reduce in disguise and its all-gather stages through lists (measured with 16 MB on 2 to 4 processes of one machine:
reduce-scatter 2.2 to 2.6 times as fast this way, all-gather 1.3 to 1.7 times). What only moves data, moves bytes, so
every dtype works.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.transport.base import Finished, Group, Transport, Work
from runtime.transport.calls import Call
from runtime.transport.errors import ConnectionLost, PeerFailure, TransportError, WaitTimeout
from runtime.transport.failure import FailureBoard, FailureReport, Watch
from runtime.transport.reduction import reduce_terms

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "or": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "and": dist.ReduceOp.MIN,
}
# Neither backend reduces int16, and gloo adds bools modulo 256: these travel as int32.
_WIDENED = (torch.bool, torch.int16)
_LOST = re.compile(r"connection (closed|reset|refused|aborted)|broken pipe|remote process exited|store is gone", re.I)
_FOREVER = timedelta(days=3650)
_SETUP = timedelta(seconds=60)  # the least time for processes to start and connect


class TorchTransport(Transport):
    """One process of a job. Make it with `from_env`."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, backend: str, device: torch.device, timeout: float | None
    ) -> None:
        super().__init__(rank, size, device, timeout)
        self.backend = backend
        self._bound = _FOREVER if timeout is None else timedelta(seconds=timeout)
        # NCCL's watchdog has only this bound; on gloo, each wait has its own and this one is for setting up.
        self._setup = self._bound if backend == "nccl" else max(self._bound, _SETUP)
        dist.init_process_group(
            backend, store=dist.PrefixStore("torch", store), rank=rank, world_size=size, timeout=self._setup
        )
        everyone = list(range(size))
        self._groups: dict[Group, dist.ProcessGroup] = {}
        self._tags: Counter[Group] = Counter()
        self._upwards = self._downwards = dist.group.WORLD
        if backend == "nccl":
            # NCCL runs the messages of a pair one after the other whatever their direction, so two ranks that first
            # send to each other would hang: each direction gets communicators of its own.
            self._upwards = dist.new_group(everyone, self._setup, backend)
            self._downwards = dist.new_group(everyone, self._setup, backend)
        self._control = dist.PrefixStore("planc objects", store)
        self._gathered = 0
        self._board = FailureBoard(store)
        self._watch = Watch(self._board.clone(), rank, lambda: self.doing)
        self._failed = False
        self._open = True
        atexit.register(self._watch.close)  # A thread inside the store's C++ code must not meet the interpreter's end.

    @classmethod
    def from_env(cls, backend: str = "auto", timeout: float | None = 600.0) -> TorchTransport:
        """Join the job that torchrun, or `launch`, describes in the environment.

        backend: "nccl", "gloo", or "auto": NCCL if each local rank has a CUDA device. With NCCL a rank uses the device
        of its LOCAL_RANK. Raises TransportError if the environment is incomplete or the devices do not suffice.
        """
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise TransportError(f"not under torchrun: {', '.join(missing)} not set")
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if backend == "auto":
            backend = "nccl" if devices >= local_size else "gloo"
        if backend not in ("nccl", "gloo"):
            raise TransportError(f"unknown backend {backend!r}; known are auto, nccl, gloo")
        device = torch.device("cpu")
        if backend == "nccl":
            if local_rank >= devices:
                raise TransportError(f"local rank {local_rank} needs a CUDA device of its own; there are {devices}")
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        bound = _FOREVER if timeout is None else timedelta(seconds=timeout)
        store, rank, size = next(dist.rendezvous("env://", timeout=max(bound, _SETUP)))
        return cls(store, rank, size, backend, device, timeout)

    # -- control -------------------------------------------------------------------------------------------------

    def prepare(self, groups: Iterable[Group]) -> None:
        wanted = list(dict.fromkeys(group for group in groups if len(group) > 1 and group not in self._groups))
        self._agree(wanted)
        for group in wanted:
            if self.rank in group:
                self._groups[group] = dist.new_group(
                    list(group), self._setup, self.backend, use_local_synchronization=True
                )

    def barrier(self, label: str | None = None) -> None:
        call = Call("barrier", tuple(range(self.size)), label=label)
        self.doing = label or self.doing
        devices = [self.device.index] if self.backend == "nccl" else None
        self._issue(call, lambda: [dist.barrier(async_op=True, device_ids=devices)]).wait()

    def gather_objects(self, obj: Any) -> list[Any]:
        # Through the store, not the backend: NCCL has no CPU tensors, and all_gather_object would pickle.
        call = Call("gather_objects", tuple(range(self.size)))
        number, self._gathered = self._gathered, self._gathered + 1
        joint = f"{number}/all"
        if self.rank:
            self._control.set(f"{number}/{self.rank}", json.dumps(obj))
            self._await_key(joint, call)
        else:
            parts = [json.loads(json.dumps(obj))]
            for rank in range(1, self.size):
                key = f"{number}/{rank}"
                self._await_key(key, call)
                parts.append(json.loads(self._control.get(key)))
                self._control.delete_key(key)
            # Every rank has come to this gathering, so all have read the last one.
            self._control.delete_key(f"{number - 1}/all")
            self._control.set(joint, json.dumps(parts))
        return json.loads(self._control.get(joint))

    def claims(self) -> bool:
        try:
            return self._board.claim(self.rank)
        except dist.DistError:
            return True  # The store is gone: nobody else can tell any more.

    def abort(self, reason: str) -> None:
        self._failed = True
        with contextlib.suppress(dist.DistError):  # the store is gone, and with it those who would read this
            self._board.report(FailureReport(self.rank, self.doing, reason))

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        # After a failure communication may be stuck, and NCCL would wait for it: the process ends with its groups, and
        # the watch makes sure that it ends.
        if not self._failed:
            self._watch.close()
            atexit.unregister(self._watch.close)
            dist.destroy_process_group()
            # The groups' threads end here, with the last reference, and not in the interpreter's own end, where gloo
            # has been seen to abort the process.
            self._groups.clear()
            del self._upwards, self._downwards
            gc.collect()

    # -- data ----------------------------------------------------------------------------------------------------

    def _all_reduce(self, call: Call, tensor: Tensor) -> Work:
        if tensor.numel() == 0:
            return Finished()
        buffer = tensor.int() if tensor.dtype in _WIDENED else tensor
        mean = call.op == "avg" and self.backend == "gloo"
        op = dist.ReduceOp.SUM if mean else _OPS[call.op or "sum"]

        def finish() -> None:
            if mean:
                buffer.div_(len(call.group))
            if buffer is not tensor:
                tensor.copy_(buffer)

        group = self._group(call)
        return self._issue(call, lambda: [dist.all_reduce(buffer, op, group, async_op=True)], finish)

    def _all_gather(self, call: Call, out: Tensor, tensor: Tensor) -> Work:
        if tensor.numel() == 0:
            return Finished()
        group = self._group(call)
        whole, mine = _bytes(out), _bytes(tensor)
        if self.backend == "nccl":
            return self._issue(call, lambda: [dist.all_gather_into_tensor(whole, mine, group, async_op=True)])
        parts = dict(zip(call.group, whole.view(len(call.group), -1), strict=True))
        own = parts.pop(self.rank)
        work = self._exchange(call, dict.fromkeys(parts, mine), parts)
        if own.data_ptr() != mine.data_ptr():
            own.copy_(mine)
        return work

    def _reduce_scatter(self, call: Call, out: Tensor, tensor: Tensor) -> Work:
        if tensor.numel() == 0:
            return Finished()
        op = call.op or "sum"
        if self.backend == "nccl":
            group = self._group(call)
            wide = tensor.dtype in _WIDENED
            source = tensor.int() if wide else tensor
            target = out.int() if wide else out
            return self._issue(
                call,
                lambda: [dist.reduce_scatter_tensor(target.view(-1), source.view(-1), _OPS[op], group, async_op=True)],
                (lambda: out.copy_(target)) if wide else None,
            )
        terms = dict(zip(call.group, tensor.view(len(call.group), -1), strict=True))
        own = terms.pop(self.rank)
        received = dict(zip(terms, own.new_empty(len(terms), own.numel()), strict=True))

        def finish() -> None:
            ordered = [own if rank == self.rank else received[rank] for rank in call.group]
            reduce_terms(ordered, op, out.view(-1))

        to_send = {rank: _bytes(part) for rank, part in terms.items()}
        return self._exchange(call, to_send, {rank: _bytes(part) for rank, part in received.items()}, finish)

    def _all_to_all(self, call: Call, out: Tensor, tensor: Tensor) -> Work:
        if tensor.numel() == 0:
            return Finished()
        group = self._group(call)
        return self._issue(
            call, lambda: [dist.all_to_all_single(_bytes(out), _bytes(tensor), group=group, async_op=True)]
        )

    def _broadcast(self, call: Call, tensor: Tensor) -> Work:
        if tensor.numel() == 0:
            return Finished()
        group = self._group(call)
        return self._issue(call, lambda: [dist.broadcast(_bytes(tensor), call.source, group, async_op=True)])

    def _send(self, call: Call, tensor: Tensor) -> Work:
        if tensor.numel() == 0:
            return Finished()
        source, to = call.group
        group = self._upwards if source < to else self._downwards
        return self._issue(call, lambda: [dist.isend(_bytes(tensor), to, group, tag=call.tag or 0)])

    def _recv(self, call: Call, tensor: Tensor) -> Work:
        if tensor.numel() == 0:
            return Finished()
        source, to = call.group
        group = self._upwards if source < to else self._downwards
        return self._issue(call, lambda: [dist.irecv(_bytes(tensor), source, group, tag=call.tag or 0)])

    def _exchange(
        self,
        call: Call,
        send: dict[int, Tensor],
        receive: dict[int, Tensor],
        finish: Callable[[], object] | None = None,
    ) -> Work:
        """A gloo collective from messages between all pairs; one tag each, as several may be in flight."""
        group = self._group(call)
        tag = self._tags[call.group] = (self._tags[call.group] + 1) % 2**30

        def start() -> list[dist.Work | None]:
            handles = [dist.irecv(part, rank, group, tag=tag) for rank, part in receive.items()]
            return handles + [dist.isend(part, rank, group, tag=tag) for rank, part in send.items()]

        return self._issue(call, start, finish)

    def _issue(
        self, call: Call, start: Callable[[], list[dist.Work | None]], finish: Callable[[], object] | None = None
    ) -> Work:
        try:
            handles = [handle for handle in start() if handle is not None]
        except RuntimeError as error:
            raise self.explain(call, error) from error
        return TorchWork(self, call, handles, finish, None if self.backend == "nccl" else self._bound)

    def _group(self, call: Call) -> dist.ProcessGroup:
        try:
            return self._groups[call.group]
        except KeyError:
            raise TransportError(f"{call}: the group {call.group} was not given to prepare()") from None

    # -- errors --------------------------------------------------------------------------------------------------

    def _await_key(self, key: str, call: Call) -> None:
        """Wait in slices, so that another rank's failure ends the wait."""
        started = time.monotonic()
        while True:
            left = self._bound.total_seconds() - (time.monotonic() - started)
            try:
                return self._control.wait([key], timedelta(seconds=max(0.001, min(1.0, left))))
            except RuntimeError as error:
                if left <= 0 or not isinstance(error, dist.DistStoreError):
                    raise self.explain(call, error) from error
                if report := self._board.first():
                    self._failed = True
                    raise PeerFailure(str(report), self.rank, str(call)) from error

    def explain(self, call: Call, error: RuntimeError) -> TransportError:
        """What an error of torch.distributed means: another rank's failure, a wait in vain, or itself."""
        self._failed = True
        text = str(error)
        late = "timed out" in text.lower() or "timeout" in text.lower()
        try:
            # A lost connection is seen before the failed rank's report, at times.
            report = self._board.first(within=0.0 if late else 3.0)
            if report is not None and report.rank != self.rank:
                return PeerFailure(str(report), self.rank, str(call))
            if late:
                others = [rank for rank in call.group if rank != self.rank]
                doing = self._board.ask(others)
                lines = [f"  rank {r}: {f'in {doing[r]!r}' if r in doing else 'does not answer'}" for r in others]
                summary = f"rank {self.rank} waited {self.timeout:g} s for {call} with ranks {call.group}"
                return WaitTimeout("\n".join([f"{summary}; meanwhile:", *lines]))
        except dist.DistError:
            text += "\nthe job's key-value store is gone: rank 0 or the launcher has ended"
        kind = ConnectionLost if _LOST.search(text) else TransportError
        lost = "a rank has ended without a word: " if kind is ConnectionLost else ""
        return kind(f"rank {self.rank}: {call} with ranks {call.group}: {lost}{text}")


class TorchWork(Work):
    """bound: of each wait; None where the backend's own watchdog bounds it (NCCL)."""

    def __init__(
        self,
        transport: TorchTransport,
        call: Call,
        handles: list[dist.Work],
        finish: Callable[[], object] | None,
        bound: timedelta | None,
    ) -> None:
        self._transport = transport
        self._call = call
        self._handles = handles
        self._finish = finish
        self._bound = bound

    def wait(self) -> None:
        try:
            for handle in self._handles:
                if self._bound is None:
                    handle.wait()
                else:
                    handle.wait(self._bound)
        except RuntimeError as error:
            raise self._transport.explain(self._call, error) from error
        self._handles = []
        if self._finish is not None:
            with torch.no_grad():
                self._finish()
            self._finish = None


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as one row of bytes."""
    return tensor.view(-1).view(torch.uint8)
