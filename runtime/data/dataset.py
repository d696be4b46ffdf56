"""What a dataset is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class DataError(Exception):
    """A data source that cannot be used, or does not fit the program; the message says why."""


class Dataset(Protocol):
    """Samples by index: each maps input names to tensors without the batch dimension.

    Indexing must be safe from a background thread.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Tensor]: ...
