"""A rank's rows of each global batch, loaded ahead of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from runtime.data.dataset import DataError, Dataset
from runtime.data.prefetch import Prefetcher
from runtime.data.sampler import Sampler, SamplerState
from runtime.factory import told


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of a global batch.

    tensors: by input name, this rank's rows stacked. valid: rows of the *global* batch that count; a local row counts
    if its global row number is below. epoch: from 0. state: the sampler's after this batch.
    """

    tensors: dict[str, Tensor]
    valid: int
    epoch: int
    state: SamplerState


class Loader:
    """Iterates over `Batch`es without end.

    rows: the global row numbers of this rank, in order; one beyond the global batch repeats its last row (programs pad
    a batch that does not divide). batch_dims: for each input the dimension along which samples are stacked (default
    0), or None for an input that is not per sample: it is taken from the batch's first sample, so that ranks agree.
    prefetch: batches loaded ahead by a thread; 0 loads on demand. pin: page-locked memory, for copies to CUDA that
    overlap.

    `state` is that of the last batch *given out*, whatever has been prefetched. Close it, or use it as a context.
    `next` raises DataError for those of the data set, naming the sample and the place in the user's code.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: Sampler,
        rows: Sequence[int] | None = None,
        batch_dims: Mapping[str, int | None] | None = None,
        prefetch: int = 2,
        pin: bool = False,
    ) -> None:
        self._dataset = dataset
        self._sampler = sampler
        self._rows = range(sampler.global_batch) if rows is None else rows
        self._batch_dims = dict(batch_dims or {})
        self._pin = pin
        self.state = sampler.state
        self._prefetcher = Prefetcher(self._load, prefetch, "data") if prefetch else None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = self._load() if self._prefetcher is None else self._prefetcher.next()
        self.state = batch.state
        return batch

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _load(self) -> Batch:
        batch = self._sampler.next_batch()
        last = len(batch.indices) - 1
        samples = [self._sample(batch.indices[min(row, last)]) for row in self._rows]
        names = list(samples[0]) if samples else []
        first = self._sample(batch.indices[0]) if None in self._batch_dims.values() else {}
        tensors = {}
        for name in names:
            dim = self._batch_dims.get(name, 0)
            tensor = first[name] if dim is None else self._stack(name, samples, dim, batch.indices)
            tensors[name] = tensor.pin_memory() if self._pin else tensor
        return Batch(tensors, batch.valid, batch.epoch, batch.state)

    def _sample(self, index: int) -> Mapping[str, Tensor]:
        try:
            return self._dataset[index]
        except Exception as error:
            raise DataError(f"the data set failed at sample {index} of {len(self._dataset)}: {told(error)}") from error

    def _stack(self, name: str, samples: Sequence[Mapping[str, Tensor]], dim: int, indices: Sequence[int]) -> Tensor:
        try:
            return torch.stack([sample[name] for sample in samples], dim)
        except (KeyError, TypeError, RuntimeError) as error:
            shapes = sorted({str(tuple(s[name].shape)) if name in s else "none" for s in samples})
            raise DataError(
                f"the samples of one batch cannot be stacked: input {name!r} has the shapes {', '.join(shapes)} "
                f"(samples {', '.join(map(str, indices[:8]))}, …)"
            ) from error
