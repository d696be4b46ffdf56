"""Random samples, for trying a plan without data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.data.dataset import DataError


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """One input of a sample. shape: without the batch dimension. low, high: integers lie in [low, high)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: int = 0
    high: int = 2

    def draw(self, generator: torch.Generator) -> Tensor:
        """Integers uniform in their range, booleans as fair coins, the rest normal."""
        if self.dtype is torch.bool:
            return torch.randint(0, 2, self.shape, generator=generator).bool()
        if self.dtype.is_floating_point or self.dtype.is_complex:
            wide = self.dtype if self.dtype in (torch.float64, torch.complex128, torch.complex64) else torch.float32
            return torch.randn(self.shape, generator=generator, dtype=wide).to(self.dtype)
        return torch.randint(self.low, self.high, self.shape, generator=generator, dtype=self.dtype)


class Synthetic:
    """`n` random samples; sample k depends on (seed, k) alone. specs: by input name."""

    def __init__(self, specs: Mapping[str, SampleSpec], n: int, seed: int = 0) -> None:
        if n < 1:
            raise DataError(f"a synthetic data set needs at least one sample, not {n}")
        self.specs = dict(specs)
        self.n = n
        self.seed = seed

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.n:
            raise IndexError(f"sample {index} of {self.n}")
        # The golden ratio in 64 bits keeps the samples of neighbouring seeds apart.
        generator = torch.Generator().manual_seed((self.seed * 0x9E3779B97F4A7C15 + index) % 2**63)
        return {name: spec.draw(generator) for name, spec in self.specs.items()}
