"""A rank's tensors: parameters and their gradients in stores, one for each bucket, and model buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from runtime.constants import read_constants
from runtime.cuts import local_part, parse_cuts
from runtime.factory import build
from runtime.program import Bucket, Parameter, Program
from runtime.store import Store
from runtime.transfer import Transfer


def initial_state(program: Program, seed: int) -> dict[str, Tensor]:
    """Full parameters and buffers as the model's own initialisation makes them under `torch.manual_seed(seed)`,
    by logical name, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(program.model["factory"], program.model["options"], program.model.get("base"))
    wanted = {p.name for p in program.parameters} | {b.name for b in program.buffers}
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach() for name, tensor in named.items() if name in wanted}


class RankState:
    """What one rank holds of the model: stores by bucket, parameters in no bucket, buffers and constants.

    `home[name]` is the store that a parameter lies in.
    """

    def __init__(
        self, program: Program, full: Mapping[str, Tensor], sizes: Mapping[str, int], coords: Mapping[str, int],
        device: torch.device,
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
        self.fill(full)

    def buckets(self) -> Iterator[Bucket]:
        """The buckets of this rank's pipeline stage."""
        yield from (bucket for bucket in self.program.buckets if self.stage in bucket.stages)

    def local_shape(self, spec: Parameter) -> tuple[int, ...]:
        shape = list(spec.shape)
        for cut in parse_cuts(spec.cuts):
            _, length = cut.part(self.sizes, self.coords)
            shape[cut.dim] = shape[cut.dim] * length // cut.count
        return tuple(shape)

    def fill(self, full: Mapping[str, Tensor]) -> None:
        """Take this rank's part of full tensors by logical name."""
        for name, spec in self.specs.items():
            part = local_part(full[name], parse_cuts(spec.cuts), self.sizes, self.coords)
            if (store := self.home.get(name)) is None:
                self.alone[name].copy_(part)
                continue
            span = store.spans[name]
            start, end = store.inside(span.start, span.end)
            first = store.start + start - span.start
            store.fill(start, part.reshape(-1)[first : first + end - start])
            if store.whole is not None:
                store.view(store.whole, name).copy_(part)
        for name, buffer in self.buffers.items():
            buffer.copy_(full[name])

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
