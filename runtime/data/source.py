"""From the text of `train { data = … }` to a dataset for a program's inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from runtime.data.dataset import DataError, Dataset
from runtime.data.packed import PackedText
from runtime.data.synthetic import SampleSpec, Synthetic
from runtime.data.text import IGNORE, VOCABULARY, TextBytes
from runtime.factory import check_arguments, told
from runtime.program import Input

GLANCE = 4096
"""Bytes of a text that tell that there is one."""

# Where Hugging Face's names are used, so is its convention: the model shifts the labels itself.
_SHIFTS_ITSELF = ("input_ids",)


def open_dataset(
    spec: str,
    inputs: Sequence[Input],
    *,
    resolve: Callable[[str], Callable[[], Dataset]],
    seed: int = 0,
    samples: int = 1024,
    limit: int | None = None,
) -> Dataset:
    """The dataset that `spec` names.

    "synthetic": `samples` random ones. "text:stdlib", "text:FOLDER": `TextBytes`, its length taken from the inputs; at
    most `limit` bytes. "module:function": whatever the function returns, called without arguments; `resolve` finds it.
    Raises DataError if the source does not exist, fails, or does not fit the inputs.
    """
    if spec == "synthetic":
        return Synthetic({item.name: sample_spec(item) for item in inputs}, samples, seed)
    if spec.startswith("text:"):
        return _text(spec.removeprefix("text:"), inputs, limit)
    make = resolve(spec)
    try:
        dataset = make()
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DataError(f"{spec} returned a {type(dataset).__name__}, which has no length or cannot be indexed")
        if len(dataset) == 0:
            raise DataError(f"{spec} returned an empty data set")
        check_sample(spec, dataset, inputs)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f'the data set of train {{ data = "{spec}" }} failed: {told(error)}') from error
    return dataset


def check_source(spec: str, inputs: Sequence[Input], resolve: Callable[[str], Callable[[], Dataset]]) -> None:
    """What can be told of a source without reading it all, or calling it. Raises DataError, or what `resolve` does."""
    folder = text_folder(spec)
    if folder is not None and not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    if spec.startswith("text:"):
        _text(spec.removeprefix("text:"), inputs, limit=GLANCE)
    elif spec != "synthetic":
        check_arguments(spec, resolve(spec), {})


def text_folder(spec: str) -> Path | None:
    """The folder of a text source."""
    return Path(spec.removeprefix("text:")) if spec.startswith("text:") and spec != "text:stdlib" else None


def sample_shape(item: Input) -> tuple[int, ...]:
    """The input's shape without its batch dimension."""
    return tuple(size for dim, size in enumerate(item.shape) if dim != item.batch_dim)


def sample_spec(item: Input) -> SampleSpec:
    # An integer input whose range is unknown gets 0 and 1, which are valid wherever an index is.
    return SampleSpec(sample_shape(item), getattr(torch, item.dtype), high=item.below or 2)


def check_sample(spec: str, dataset: Dataset, inputs: Sequence[Input]) -> None:
    """Raise DataError unless the first sample has a tensor of the right shape for each input."""
    sample = dataset[0]
    for item in inputs:
        if item.name not in sample:
            raise DataError(f"{spec}: a sample has {', '.join(map(str, sample)) or 'nothing'}, but not {item.name}")
        found, wanted = tuple(sample[item.name].shape), sample_shape(item)
        if found != wanted:
            raise DataError(f"{spec}: {item.name} has shape {list(found)}, but the program needs {list(wanted)}")


def _packed(folder: str, inputs: Sequence[Input], limit: int | None) -> PackedText:
    """For a model that reads where documents end."""
    kinds = ("document", "position", "label")
    named = {kind: next((item.name for item in inputs if kind in item.name), None) for kind in kinds}
    rest = [item for item in inputs if item.name not in named.values()]
    shapes = {sample_shape(item) for item in inputs}
    if len(rest) != 1 or len(shapes) != 1 or len(sample_shape(rest[0])) != 1 or {i.dtype for i in inputs} != {"int64"}:
        wanted = "inputs int64[batch, seq] for tokens, labels, documents and perhaps positions"
        raise DataError(f"packed text needs {wanted}; the plan has {', '.join(item.name for item in inputs)}")
    return PackedText(
        folder, sample_shape(rest[0])[0], rest[0].name, named["label"], named["document"], named["position"], limit=limit
    )


def _text(folder: str, inputs: Sequence[Input], limit: int | None) -> Dataset:
    if any("document" in item.name for item in inputs):
        return _packed(folder, inputs, limit)
    rows = [item for item in inputs if item.dtype == "int64" and len(sample_shape(item)) == 1]
    if len(rows) != len(inputs) or not 1 <= len(rows) <= 2 or len({sample_shape(item) for item in rows}) > 1:
        wanted = "one input int64[batch, seq], or two (tokens and labels) of one shape"
        raise DataError(f"text needs {wanted}; the plan has {', '.join(item.name for item in inputs)}")
    labels = next((item for item in rows if "label" in item.name or "target" in item.name), rows[-1])
    tokens = next((item for item in rows if item is not labels), rows[0])
    if tokens.below is not None and tokens.below < VOCABULARY:
        raise DataError(f"text has byte values below {VOCABULARY}, but {tokens.name} must be below {tokens.below}")
    return TextBytes(
        folder,
        sample_shape(tokens)[0],
        names=(tokens.name, labels.name if labels is not tokens else None),
        shift=tokens.name not in _SHIFTS_ITSELF,
        ignore=IGNORE if labels.ignore is None else labels.ignore,
        limit=limit,
    )
