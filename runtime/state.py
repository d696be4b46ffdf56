"""A rank's tensors: parameters and their gradients in stores, one for each bucket, and model buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from runtime.constants import read_constants
from runtime.cuts import parse_cuts, part_of_rows
from runtime.program import Bucket, Parameter, Program
from runtime.store import Store
from runtime.transfer import Transfer


class RankState:
    """What one rank holds of the model: stores by bucket, parameters in no bucket, buffers and constants.

    `home[name]` is the store that a parameter lies in. What a new state holds is to be filled in.
    """

    def __init__(
        self, program: Program, sizes: Mapping[str, int], coords: Mapping[str, int], device: torch.device
    ):  # fmt: skip
        self.program, self.sizes, self.coords, self.device = program, sizes, coords, device
        self.stage = coords.get(program.pipeline, 0)
        transfer = Transfer(device)
        self.specs = {p.name: p for p in program.parameters if self.stage in p.stages}
        self.stores: dict[str, Store] = {}
        self.home: dict[str, Store] = {}
        for bucket in self.buckets():
            shapes = {name: self.local_shape(self.specs[name]) for name in bucket.parameters}
            store = self.stores[bucket.name] = Store(bucket, shapes, sizes, coords, transfer)
            self.home.update(dict.fromkeys(bucket.parameters, store))
        self.alone = {
            spec.name: torch.empty(self.local_shape(spec), dtype=getattr(torch, spec.dtype), device=device)
            for spec in self.specs.values()
            if spec.name not in self.home
        }
        self.buffers = {
            buffer.name: torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype), device=device)
            for buffer in program.buffers
        }
        self.constants = {name: tensor.to(device) for name, tensor in read_constants(program).items()}

    def buckets(self) -> Iterator[Bucket]:
        """The buckets of this rank's pipeline stage."""
        yield from (bucket for bucket in self.program.buckets if self.stage in bucket.stages)

    def local_shape(self, spec: Parameter) -> tuple[int, ...]:
        shape = list(spec.shape)
        for cut in parse_cuts(spec.cuts):
            shape[cut.dim] = shape[cut.dim] * cut.length(cut.ways(self.sizes)) // cut.count
        return tuple(shape)

    def fill(self, full: Mapping[str, Tensor]) -> None:
        """Take this rank's part of full tensors by logical name; of those that read lazily no more is read."""
        for name in (*self.specs, *self.buffers):
            tensor = full[name]
            self.take(name, tensor if tensor.dim() else tensor.reshape(1))

    def take(self, name: str, rows: Tensor, first: int = 0) -> None:
        """Take this rank's part of the rows of a full tensor from `first` on (a scalar is a row). What is not held here
        is passed over."""
        if name in self.buffers:
            self.write(name, first * math.prod(rows.shape[1:]), rows)
        elif name in self.specs:
            spec = self.specs[name]
            for start, part in part_of_rows(rows, first, spec.shape, parse_cuts(spec.cuts), self.sizes, self.coords):
                self.write(name, start, part)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Replace what this rank holds from the element `start` of its part of a tensor on."""
        values = values.reshape(-1)
        if name in self.home:
            store = self.home[name]
            store.write(store.spans[name].start + start, values)
            return
        held = self.buffers[name] if name in self.buffers else self.alone[name]
        held.view(-1)[start : start + values.numel()].copy_(values)

    def parameter(self, name: str) -> Tensor:
        """A parameter as the code reads it: a view of its bucket's whole buffer, which must be there."""
        store = self.home.get(name)
        if store is None:
            return self.alone[name]
        assert store.whole is not None, f"{name} is not gathered"
        return store.view(store.whole, name)

    def gradient(self, name: str) -> Tensor:
        """Where a parameter's gradient is summed: a view of its bucket's whole gradients, which must be there."""
        store = self.home[name]
        assert store.gradient is not None, f"the gradients of {store.bucket.name} did not begin"
        return store.view(store.gradient, name)

    def resolve(self, reference: str) -> Tensor:
        """The tensor of a "param:", "buffer:" or "const:" reference."""
        kind, _, name = reference.partition(":")
        if kind == "param":
            return self.parameter(name)
        return {"buffer": self.buffers, "const": self.constants}[kind][name]
