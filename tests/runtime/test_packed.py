"""Packed documents: every byte in exactly one place, attention within documents, positions that restart."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from runtime.data import DataError, PackedText, open_dataset
from runtime.data.packed import document_ids, ids_of_boundaries, pack, restarting_positions
from runtime.program import Input


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = random.Random(0)
    for k, length in enumerate([0, 1, 5, 16, 17, 40, 3, 3, 31]):
        (tmp_path / f"{k}.txt").write_bytes(bytes(rng.randrange(256) for _ in range(length)))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.md").write_text("hello")
    (tmp_path / "left.out").write_text("no text")
    return tmp_path


def test_every_byte_is_in_exactly_one_place(folder: Path) -> None:
    data = PackedText(folder, seq=16)
    places = Counter((c.file, k) for row in data.rows for c in row for k in range(c.start, c.start + c.length))
    assert set(places) == {(f, k) for f, text in enumerate(data.texts) for k in range(len(text))}
    assert set(places.values()) == {1}
    found: dict[int, dict[int, int]] = {}
    for row, sample in zip(data.rows, (data[k] for k in range(len(data)))):
        at = 0
        for chunk in row:
            for k in range(chunk.length):
                found.setdefault(chunk.file, {})[chunk.start + k] = int(sample["tokens"][at + k])
            at += chunk.length
    for file, path in enumerate(data.paths):
        assert bytes(found.get(file, {})[k] for k in range(len(found.get(file, {})))) == path.read_bytes()


def test_labels_documents_and_positions(folder: Path) -> None:
    data = PackedText(folder, seq=16, positions="positions")
    for row, sample in zip(data.rows, (data[k] for k in range(len(data)))):
        at = 0
        for number, chunk in enumerate(row):
            text, part = data.texts[chunk.file], slice(at, at + chunk.length)
            assert sample["documents"][part].tolist() == [number] * chunk.length
            assert sample["positions"][part].tolist() == list(range(chunk.length))
            following = [
                int(text[k]) if k < len(text) else -100 for k in range(chunk.start + 1, chunk.start + chunk.length + 1)
            ]
            assert sample["labels"][part].tolist() == following
            at += chunk.length
        assert sample["labels"][at:].tolist() == [-100] * (16 - at)
    total = sum(len(text) for text in data.texts)
    assert len(data) <= 1.3 * total / 16 + 1, "rows are nearly full"


@pytest.mark.parametrize("seed", range(10))
def test_packing_of_random_lengths(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(0, 50) for _ in range(rng.randrange(1, 60))]
    rows = pack(lengths, 16)
    assert all(sum(chunk.length for chunk in row) <= 16 for row in rows)
    chunks = sorted((c.file, c.start, c.length) for row in rows for c in row)
    assert [sum(n for f, _, n in chunks if f == k) for k in range(len(lengths))] == lengths
    assert sum(16 - sum(chunk.length for chunk in row) > 8 for row in rows) <= 1, "at most one row is half empty"


def test_ids_of_lengths_and_of_boundaries() -> None:
    assert document_ids([2, 3], 7).tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert ids_of_boundaries([0, 2, 5]).tolist() == [0, 0, 1, 1, 1]
    assert restarting_positions(torch.tensor([[4, 4, 7, 7, 7], [0, 1, 1, 2, 2]])).tolist() == [
        [0, 1, 0, 1, 2],
        [0, 0, 1, 0, 1],
    ]
    with pytest.raises(DataError, match="do not fit"):
        document_ids([4], 3)


def test_a_plan_that_has_documents_gets_packed_text(folder: Path) -> None:
    inputs = [Input(name, "int64", (2, 16)) for name in ("tokens", "labels", "documents")]
    data = open_dataset(f"text:{folder}", inputs, resolve=lambda spec: None)  # type: ignore[arg-type,return-value]
    assert isinstance(data, PackedText) and set(data[0]) == {"tokens", "labels", "documents"}
