"""Byte-level language modelling on the Python files of a folder."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.data.dataset import DataError

VOCABULARY = 256
IGNORE = -100  # the label that torch's losses skip by default

_LEFT_OUT = ("site-packages", "dist-packages", "__pycache__")


class TextBytes:
    """The `.py` files of a folder ("stdlib": the running Python's library), cut into samples of `seq` bytes.

    The files, in the order of their paths, are one stream of N bytes. Sample k holds `seq` of them from k·seq on. With
    `shift` the label of a byte is the next one, so N − 1 labels exist, each in exactly one sample; without, it is the
    byte itself (for models that shift on their own). Samples are int64, of shape [seq]; the last one is filled up with
    byte 0 and the label `ignore`.

    names: of the tokens and the labels; None leaves the labels out. limit: the number of bytes read at most.
    Raises DataError if the folder does not exist or holds less than two bytes.
    """

    def __init__(
        self,
        folder: str | Path,
        seq: int,
        names: tuple[str, str | None] = ("tokens", "labels"),
        shift: bool = True,
        ignore: int = IGNORE,
        limit: int | None = None,
    ) -> None:
        if seq < 1:
            raise DataError(f"a text sample needs at least one byte, not {seq}")
        root = Path(sysconfig.get_path("stdlib")) if folder == "stdlib" else Path(folder)
        if not root.is_dir():
            raise DataError(f"there is no folder {root}")
        text = _read(root, limit)
        if len(text) < 2:
            raise DataError(f"the folder {root} holds no text in .py files")
        self.seq = seq
        self.names = names
        self.shift = shift
        self.ignore = ignore
        self._bytes = torch.frombuffer(text, dtype=torch.uint8)

    @property
    def n_bytes(self) -> int:
        return self._bytes.numel()

    @property
    def n_labels(self) -> int:
        """The labels that count, over all samples."""
        return self.n_bytes - int(self.shift)

    def __len__(self) -> int:
        return (self.n_labels + self.seq - 1) // self.seq

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.seq
        end = min(start + self.seq, self.n_labels)
        missing = (0, start + self.seq - end)
        tokens, labels = self.names
        sample = {tokens: pad(self._bytes[start:end].long(), missing)}
        if labels is not None:
            first, last = start + int(self.shift), end + int(self.shift)
            sample[labels] = pad(self._bytes[first:last].long(), missing, value=self.ignore)
        return sample

    def unigram_entropy(self) -> float:
        """The entropy of a single byte of the text, in nats: the loss of a model that knows only byte frequencies."""
        counts = torch.bincount(self._bytes, minlength=VOCABULARY).double()
        shares = counts[counts > 0] / counts.sum()
        return -(shares * shares.log()).sum().item()


def _read(root: Path, limit: int | None) -> bytearray:
    """The text of the folder's files, ordered by relative path."""
    text = bytearray()
    for path in sorted(_python_files(root), key=lambda path: path.relative_to(root).as_posix()):
        text += path.read_bytes()
        if limit is not None and len(text) >= limit:
            return text[:limit]
    return text


def _python_files(root: Path) -> Iterator[Path]:
    """Third-party packages are left out: they differ between installations of one Python."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))
