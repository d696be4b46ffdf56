"""Which samples make up each global batch. Nothing here knows how many ranks there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

_MIX = 0x9E3779B97F4A7C15  # spreads consecutive epochs over the seeds (the golden ratio in 64 bits)


@dataclass(frozen=True, slots=True)
class BatchIndices:
    """One global batch.

    indices: `global_batch` of them. valid: the first so many count; the rest repeat samples of the epoch to fill up.
    epoch: from 0. state: the sampler's after this batch, for a checkpoint.
    """

    indices: tuple[int, ...]
    valid: int
    epoch: int
    state: SamplerState


@dataclass(frozen=True, slots=True)
class SamplerState:
    """position: samples of the epoch already given out."""

    epoch: int = 0
    position: int = 0

    def to_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    @classmethod
    def from_dict(cls, state: Mapping[str, int]) -> SamplerState:
        return cls(int(state["epoch"]), int(state["position"]))


class Sampler:
    """Global batches without end; each epoch holds every sample exactly once.

    The order depends on (seed, epoch) alone. What is left at an epoch's end is padded (`tail="pad"`) or left out
    (`"drop"`). The state counts samples, so a run may resume with another batch size or number of ranks.

    Raises ValueError if there are no samples, or fewer than a batch with `tail="drop"`.
    """

    def __init__(
        self,
        n_samples: int,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        epoch: int = 0,
        tail: str = "pad",
    ) -> None:
        if tail not in ("pad", "drop"):
            raise ValueError(f"tail is 'pad' or 'drop', not {tail!r}")
        if n_samples < 1 or global_batch < 1:
            raise ValueError(f"{n_samples} samples in batches of {global_batch}: both must be at least 1")
        if tail == "drop" and n_samples < global_batch:
            raise ValueError(f"{n_samples} samples never fill a batch of {global_batch}, and tail = drop")
        self.n_samples = n_samples
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        self.tail = tail
        self.state = SamplerState(epoch)
        self._order: tuple[int, list[int]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.n_samples, self.global_batch)
        return full + (1 if rest and self.tail == "pad" else 0)

    def load_state(self, state: SamplerState | Mapping[str, int]) -> None:
        """Continue after the batch whose `state` this is."""
        self.state = state if isinstance(state, SamplerState) else SamplerState.from_dict(state)

    def order(self, epoch: int) -> list[int]:
        """The samples of an epoch in order."""
        if not self.shuffle:
            return list(range(self.n_samples))
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed((self.seed + epoch * _MIX) % 2**63)
            self._order = (epoch, torch.randperm(self.n_samples, generator=generator).tolist())
        return self._order[1]

    def next_batch(self) -> BatchIndices:
        """The next global batch; begins the next epoch where one ends."""
        epoch, position = self.state.epoch, self.state.position
        left = self.n_samples - position
        if left < (1 if self.tail == "pad" else self.global_batch):
            epoch, position, left = epoch + 1, 0, self.n_samples
        order = self.order(epoch)
        valid = min(left, self.global_batch)
        indices = order[position : position + valid]
        indices += [order[k % self.n_samples] for k in range(self.global_batch - valid)]
        self.state = SamplerState(epoch, position + valid)
        return BatchIndices(tuple(indices), valid, epoch, self.state)

    def __iter__(self) -> Iterator[BatchIndices]:
        while True:
            yield self.next_batch()
