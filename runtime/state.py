"""A rank's tensors: parameters and their gradients in flat buffers, one pair for each bucket, and model buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from runtime.constants import read_constants
from runtime.cuts import local_part, parse_cuts
from runtime.factory import build
from runtime.program import Bucket, Program


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
    """What one rank holds of the model.

    `flat[bucket]` and `gradients[bucket]` are 1-D; `parameters[name]` and `gradient_views[name]` are views into them.
    Parameters that are not trained stand alone.
    """

    def __init__(
        self, program: Program, full: Mapping[str, Tensor], sizes: Mapping[str, int], coords: Mapping[str, int],
        device: torch.device,
    ):  # fmt: skip
        self.program, self.sizes, self.coords, self.device = program, sizes, coords, device
        self.flat: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}
        self.gradient_views: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.constants = read_constants(program)
        specs = {p.name: p for p in program.parameters}
        for bucket in program.buckets:
            self._allocate(bucket, {name: self._local_shape(specs[name]) for name in bucket.parameters})
        for spec in program.parameters:
            if spec.name not in self.parameters:
                dtype = getattr(torch, spec.dtype)
                self.parameters[spec.name] = torch.empty(self._local_shape(spec), dtype=dtype, device=device)
        for buffer in program.buffers:
            dtype = getattr(torch, buffer.dtype)
            self.buffers[buffer.name] = torch.empty(buffer.shape, dtype=dtype, device=device)
        self.constants = {name: tensor.to(device) for name, tensor in self.constants.items()}
        self.fill(full)

    def _local_shape(self, spec) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
        shape = list(spec.shape)
        for cut in parse_cuts(spec.cuts):
            _, length = cut.part(self.sizes, self.coords)
            shape[cut.dim] = shape[cut.dim] * length // cut.count
        return tuple(shape)

    def _allocate(self, bucket: Bucket, shapes: Mapping[str, tuple[int, ...]]) -> None:
        dtype = getattr(torch, bucket.dtype)
        flat = self.flat[bucket.name] = torch.zeros(bucket.numel, dtype=dtype, device=self.device)
        gradient = self.gradients[bucket.name] = torch.zeros_like(flat)
        start = 0
        for name, shape in shapes.items():
            end = start + math.prod(shape)
            self.parameters[name] = flat[start:end].view(shape)
            self.gradient_views[name] = gradient[start:end].view(shape)
            start = end

    def fill(self, full: Mapping[str, Tensor]) -> None:
        """Take this rank's part of full tensors by logical name."""
        cuts = {p.name: parse_cuts(p.cuts) for p in self.program.parameters}
        for name, target in [*self.parameters.items(), *self.buffers.items()]:
            part = local_part(full[name], cuts.get(name, ()), self.sizes, self.coords)
            target.copy_(part)

    def resolve(self, reference: str) -> Tensor:
        """The tensor of a "param:", "buffer:" or "const:" reference."""
        kind, _, name = reference.partition(":")
        return {"param": self.parameters, "buffer": self.buffers, "const": self.constants}[kind][name]

    def decay_ranges(self, bucket: Bucket) -> Iterator[tuple[str, int, int, bool]]:
        """(name, start, end, decayed) of the two parts of a bucket's flat buffer, empty ones left out."""
        border = sum(self.parameters[name].numel() for name in bucket.parameters[: bucket.decayed])
        for part, start, end, decayed in (("decay", 0, border, True), ("plain", border, bucket.numel, False)):
            if end > start:
                yield f"{bucket.name}.{part}", start, end, decayed
