"""Stores: the memory of one bucket on one rank.

A bucket is one flat buffer; its parameters and their gradients are views into it. Without ZeRO everything is whole on
each rank. With ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054) the buffer, padded to a multiple, is
cut into equal parts over the axes `shard`, and a rank's own part is the truth:

                    whole parameters          whole gradients            own part of the gradients
    zero = 0        always                    always                     is the whole
    zero = 1        always, gathered again    always                     a view into the whole
    zero = 2        always, gathered again    from `begin` to its end    memory of its own
    zero = 3        from `gather` to `free`   from `begin` to its end    memory of its own

What comes and goes is the allocator's in between, so that activations may lie where it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.program import Bucket
from runtime.transfer import Transfer
from runtime.transport import Work


@dataclass(frozen=True, slots=True)
class Span:
    """A parameter's place [start, end) in its bucket's flat buffer, and its local shape."""

    start: int
    end: int
    shape: tuple[int, ...]


class Store:
    """A bucket's memory. `start` and `length`: this rank's own part of the flat buffer of `padded` elements."""

    def __init__(
        self, bucket: Bucket, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int],
        coords: Mapping[str, int], transfer: Transfer,
    ):  # fmt: skip
        self.bucket, self.transfer, self.device = bucket, transfer, transfer.device
        self.dtype = getattr(torch, bucket.dtype)
        self.gradient_dtype = getattr(torch, bucket.reduce or bucket.dtype)
        self.spans: dict[str, Span] = {}
        at = 0
        for name, shape in shapes.items():
            self.spans[name] = Span(at, at := at + math.prod(shape), shape)
        ways, index = 1, 0
        for axis in bucket.shard:
            ways, index = ways * sizes[axis], index * sizes[axis] + coords[axis]
        self.ways = ways
        self.length = math.ceil(bucket.numel / ways)
        self.start, self.padded = index * self.length, self.length * ways
        # Zeros, so that padding never holds anything else.
        self.whole: Tensor | None = None
        steps_on_host = bucket.trained and bucket.offload in ("optimizer", "all")
        self.shard: Tensor | None = None
        self.host: Tensor | None = None
        if bucket.zero < 3:
            self.whole = torch.zeros(self.padded, dtype=self.dtype, device=self.device)
            self.shard = self.own(self.whole)
        elif bucket.offload not in ("params", "all"):
            self.shard = torch.zeros(self.length, dtype=self.dtype, device=self.device)
        if self.shard is None or steps_on_host:
            self.host = transfer.host_zeros(self.length, self.dtype)
        self.master: Tensor | None = None
        if bucket.master and bucket.master != bucket.dtype:
            dtype = getattr(torch, bucket.master)
            self.master = (
                transfer.host_zeros(self.length, dtype) if steps_on_host
                else torch.zeros(self.length, dtype=dtype, device=self.device)
            )  # fmt: skip
        self.gradient: Tensor | None = None
        self.reduced: Tensor | None = None
        self.host_gradient = transfer.host_zeros(self.length, self.gradient_dtype) if steps_on_host else None
        if bucket.trained:
            if bucket.zero < 2:
                self.gradient = torch.zeros(self.padded, dtype=self.gradient_dtype, device=self.device)
                self.reduced = self.own(self.gradient)
            else:
                self.reduced = torch.zeros(self.length, dtype=self.gradient_dtype, device=self.device)
        self.arriving: Tensor | None = None
        self.staged: Tensor | None = None
        self._views: dict[tuple[int, str], Tensor] = {}

    def own(self, flat: Tensor) -> Tensor:
        """This rank's part of a padded flat buffer: a view."""
        return flat[self.start : self.start + self.length]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer on the device, with arbitrary contents."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    @property
    def truth(self) -> Tensor:
        """The own part of the parameters, as exact as there is; perhaps in the host's memory."""
        return next(tensor for tensor in (self.master, self.host, self.shard) if tensor is not None)

    def write(self, at: int, values: Tensor) -> None:
        """Take values of the whole flat buffer from `at` on; those of the own part, and the others where they are."""
        start, end = self.inside(at, at + values.numel())
        begin = self.start + start - at
        for tensor in (self.shard, self.host, self.master):
            if tensor is not None:
                tensor[start:end].copy_(values[begin : begin + end - start])
        if self.whole is not None:
            self.whole[at : at + values.numel()].copy_(values)

    def round(self) -> None:
        """The code reads a rounded copy of the master."""
        if self.master is not None:
            self.shard.copy_(self.master)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A parameter in a whole buffer."""
        key = (id(flat), name)
        if key not in self._views:
            span = self.spans[name]
            self._views[key] = flat[span.start : span.end].view(span.shape)
        return self._views[key]

    def release(self, flat: Tensor) -> None:
        """A whole buffer goes, with the views into it."""
        for name in self.spans:
            self._views.pop((id(flat), name), None)

    # -- parameters ----------------------------------------------------------------------------------------------

    def open(self) -> Tensor:
        """The whole buffer, to be gathered into; its contents but for the own part are arbitrary."""
        if self.whole is None:
            self.whole = self.empty(self.padded, self.dtype)
        return self.whole

    def close(self) -> None:
        """The whole parameters go."""
        assert self.whole is not None and self.bucket.zero == 3
        self.release(self.whole)
        self.whole = None

    # -- the host ------------------------------------------------------------------------------------------------

    def on_host(self) -> list[Tensor]:
        """What lives in the host's memory."""
        held = [self.host, self.host_gradient, self.master if self.host_gradient is not None else None]
        return [tensor for tensor in held if tensor is not None]

    def load(self) -> Work:
        """The own part of the parameters from the host: to its place, or if it has none to a buffer for a while."""
        assert self.host is not None
        if self.shard is None:
            self.staged = self.empty(self.length, self.dtype)
        return self.transfer.start(self.on_device, self.host)

    @property
    def on_device(self) -> Tensor:
        """The own part of the parameters on the device."""
        tensor = self.staged if self.shard is None else self.shard
        assert tensor is not None, f"{self.bucket.name} is not loaded"
        return tensor

    def unstage(self) -> None:
        """What was loaded for a while goes."""
        self.staged = None

    # -- gradients -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Whole gradients come into being; their contents are arbitrary but for padding."""
        assert self.gradient is None, f"the gradients of {self.bucket.name} are there already"
        self.gradient = self.empty(self.padded, self.gradient_dtype)
        self.gradient[self.bucket.numel :].zero_()

    def arrive(self, first: bool) -> Tensor:
        """Where the own part of the sum goes: into its place, or beside it if that holds earlier micro-batches."""
        assert self.reduced is not None
        if first:
            return self.reduced
        self.arriving = self.empty(self.length, self.gradient_dtype)
        return self.arriving

    def arrived(self) -> None:
        """The sum is there: add it to what earlier micro-batches gave, and let the whole gradients go."""
        if self.arriving is not None:
            assert self.reduced is not None
            self.reduced.add_(self.arriving)
            self.arriving = None
        if self.bucket.zero >= 2:
            assert self.gradient is not None
            self.release(self.gradient)
            self.gradient = None

    # -- parts of the own part -----------------------------------------------------------------------------------

    def decays(self) -> Iterator[tuple[str, int, int, bool]]:
        """(name, start, end, decayed) of the parts of the own part that are updated alike, empty ones left out; start
        and end count from the own part's beginning."""
        border = sum(self.spans[name].end - self.spans[name].start for name in self.bucket.parameters[: self.bucket.decayed])
        for part, start, end, decayed in (("decay", 0, border, True), ("plain", border, self.bucket.numel, False)):
            start, end = self.inside(start, end)
            if end > start:
                yield f"{self.bucket.name}.{part}", start, end, decayed

    def inside(self, start: int, end: int) -> tuple[int, int]:
        """The part of [start, end) of the flat buffer that this rank owns, from the own part's beginning."""
        start, end = max(start - self.start, 0), min(end - self.start, self.length)
        return start, max(start, end)
