"""Several documents in one row: a folder of text files as samples of equal length, without a byte lost.

A document that is longer than a row is cut into chunks; chunks are put together so that rows are full (best fit,
longest first). A chunk is a document of its own for attention: `documents` counts them in each row, and the rest of a
row is one more. `positions` restart with each. The label of a byte is the byte behind it in its file, also where that
one is in another chunk; the last byte of a file has none.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime.data.dataset import DataError
from runtime.data.text import IGNORE


def document_ids(lengths: Sequence[int], size: int | None = None) -> Tensor:
    """int64[size] that numbers documents of these lengths, one after the other; what is left is one more document."""
    total = sum(lengths)
    size = total if size is None else size
    if total > size:
        raise DataError(f"documents of {total} tokens do not fit into {size}")
    counts = torch.tensor([*lengths, size - total])
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def ids_of_boundaries(boundaries: Sequence[int]) -> Tensor:
    """The same from cumulative lengths, [0, 3, 9, …], as kernels for variable lengths take them."""
    return document_ids([end - start for start, end in zip(boundaries, boundaries[1:])])


def restarting_positions(documents: Tensor) -> Tensor:
    """int64[..., s]: the place of each token within its document."""
    at = torch.arange(documents.shape[-1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return at - torch.where(begins, at, 0).cummax(-1).values


@dataclass(frozen=True, slots=True)
class Chunk:
    """`length` bytes of file number `file` from `start` on."""

    file: int
    start: int
    length: int


def pack(lengths: Sequence[int], seq: int) -> list[list[Chunk]]:
    """Rows of chunks of documents of these lengths, no row longer than `seq`."""
    chunks = [
        Chunk(file, start, min(seq, length - start))
        for file, length in enumerate(lengths)
        for start in range(0, length, seq)
    ]
    rows: list[list[Chunk]] = []
    free: list[tuple[int, int]] = []  # (what is left, row), ascending
    for chunk in sorted(chunks, key=lambda chunk: (-chunk.length, chunk.file, chunk.start)):
        at = bisect.bisect_left(free, (chunk.length, -1))
        left, row = free.pop(at) if at < len(free) else (seq, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(chunk)
        if left > chunk.length:
            bisect.insort(free, (left - chunk.length, row))
    return rows


class PackedText:
    """The files of a folder, each a document, packed into samples of `seq` bytes.

    Samples are int64[seq] by the given names; a name that is None is left out. Rows are filled up with byte 0, which
    has the label `ignore`. limit: no further file is read behind so many bytes. Raises DataError if there is no text.
    """

    def __init__(
        self,
        folder: str | Path,
        seq: int,
        tokens: str = "tokens",
        labels: str | None = "labels",
        documents: str | None = "documents",
        positions: str | None = None,
        suffixes: Sequence[str] = (".txt", ".md", ".py"),
        ignore: int = IGNORE,
        limit: int | None = None,
    ) -> None:
        root = Path(folder)
        if not root.is_dir():
            raise DataError(f"there is no folder {root}")
        self.paths = sorted(path for path in root.rglob("*") if path.is_file() and path.suffix in suffixes)
        texts: list[bytes] = []
        for path in self.paths:
            texts.append(path.read_bytes())
            if limit is not None and sum(map(len, texts)) >= limit:
                break
        if not any(texts):
            raise DataError(f"the folder {root} holds no text in {', '.join(suffixes)} files")
        self.texts = [
            torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.zeros(0) for text in texts
        ]
        self.rows = pack([len(text) for text in texts], seq)
        self.seq, self.ignore = seq, ignore
        self.names = {"tokens": tokens, "labels": labels, "documents": documents, "positions": positions}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        tokens = torch.zeros(self.seq, dtype=torch.int64)
        labels = torch.full((self.seq,), self.ignore)
        at = 0
        for chunk in row:
            text, end = self.texts[chunk.file], chunk.start + chunk.length
            tokens[at : at + chunk.length] = text[chunk.start : end]
            following = text[chunk.start + 1 : end + 1]
            labels[at : at + len(following)] = following.long()
            at += chunk.length
        documents = document_ids([chunk.length for chunk in row], self.seq)
        made = {
            "tokens": tokens,
            "labels": labels,
            "documents": documents,
            "positions": restarting_positions(documents),
        }
        return {name: made[kind] for kind, name in self.names.items() if name is not None}
