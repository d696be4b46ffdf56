"""Data: which samples make up a global batch, and how a rank gets its rows of it."""

from runtime.data.dataset import DataError, Dataset
from runtime.data.loader import Batch, Loader
from runtime.data.packed import PackedText
from runtime.data.sampler import BatchIndices, Sampler, SamplerState
from runtime.data.source import open_dataset
from runtime.data.synthetic import SampleSpec, Synthetic
from runtime.data.text import TextBytes

__all__ = [
    "Batch",
    "BatchIndices",
    "DataError",
    "Dataset",
    "Loader",
    "PackedText",
    "SampleSpec",
    "Sampler",
    "SamplerState",
    "Synthetic",
    "TextBytes",
    "open_dataset",
]
