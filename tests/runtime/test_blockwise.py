"""Blocks of attention: which there are, and that merging them is exact however many there are."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from runtime.blocks import Documents, asked, visible_blocks
from runtime.blockwise import Backward, Forward, Scores
from runtime.cuts import Cut, Run, runs


def parts(length: int, ways: int, order: str) -> list[tuple[Run, ...]]:
    cut = Cut(0, ("cp",), 1, length, 1, order)
    return [tuple(runs((cut,), length, {"cp": ways}, {"cp": k})) for k in range(ways)]


@pytest.mark.parametrize("seed", range(30))
def test_blocks_cover_what_is_seen_just_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.blocks.TILE", 3)
    visible_blocks.cache_clear()
    rng = random.Random(seed)
    length, ways = rng.randrange(1, 30), rng.randrange(1, 5)
    causal, window = rng.random() < 0.8, rng.choice([None, None, 1, 4, 9])
    documents = torch.tensor([sorted(rng.randrange(4) for _ in range(length)) for _ in range(2)])
    within = rng.random() < 0.5
    pieces = parts(length, ways, rng.choice(["", "zigzag"]))
    scores = Scores(causal, window, 1.0, documents=documents if within else None)
    at = torch.arange(length)
    truth = torch.ones(2, length, length, dtype=torch.bool)
    if causal:
        truth &= at <= at[:, None]
    if window is not None:
        truth &= at > at[:, None] - window
    if within:
        truth &= documents[:, :, None] == documents[:, None, :]
    times = torch.zeros(2, length, length, dtype=torch.int64)
    for queries, keys in itertools.product(pieces, pieces):
        blocks = visible_blocks(queries, keys, causal, window)
        blocks = Documents(documents).within(blocks) if within else blocks
        blocks = asked(blocks) if rng.random() < 0.3 else blocks
        for block in blocks:
            local = {run.local + k: run.start + k for run in queries for k in range(run.length)}
            assert local[block.q] == block.q_at and local[block.q + block.rows - 1] == block.q_at + block.rows - 1
            seen = torch.ones(block.rows, block.columns, dtype=torch.bool)
            if block.kind == "causal":
                assert block.rows == block.columns and block.q_at == block.k_at
                seen = seen.tril()
            elif block.kind == "some":
                found = scores.seen(block, torch.device("cpu"))
                seen = seen if found is None else found.squeeze(-3) if found.dim() > 2 else found
            area = times[:, block.q_at : block.q_at + block.rows, block.k_at : block.k_at + block.columns]
            area += seen.expand(area.shape)
    visible_blocks.cache_clear()
    assert torch.equal(times, truth.long())


def attend(q, k, v, ways, scores):  # type: ignore[no-untyped-def]
    """Keys in so many blocks, one after the other, and the gradients of a sum."""
    length = q.shape[-2]
    queries, pieces = (Run(0, 0, length),), parts(length, ways, "")
    found = Forward(q, v.shape[-1], scores)
    for piece in pieces:
        part = [x[..., piece[0].start : piece[0].start + piece[0].length, :] for x in (k, v)]
        found.add(*part, visible_blocks(queries, piece, scores.causal, scores.window))
    out = found.out.to(q.dtype)
    back = Backward(torch.ones_like(out), q, out, found.lse, scores)
    dk, dv = (torch.zeros_like(x, dtype=found.out.dtype) for x in (k, v))
    for piece in pieces:
        at = slice(piece[0].start, piece[0].start + piece[0].length)
        blocks = visible_blocks(queries, piece, scores.causal, scores.window)
        back.add(k[..., at, :], v[..., at, :], dk[..., at, :], dv[..., at, :], blocks)
    return found.out, back.dq, dk, dv


@pytest.mark.parametrize("causal", [True, False])
def test_half_precision_loses_no_more_with_more_blocks(causal: bool) -> None:
    """Merged in single precision: the error against exact attention does not grow with the number of parts."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 256, 16).bfloat16() for _ in range(3))
    scores = Scores(causal, None, 0.25)
    exact = attend(q.double(), k.double(), v.double(), 1, scores)
    errors = {
        ways: [float((a.double() - b).abs().max()) for a, b in zip(attend(q, k, v, ways, scores), exact)]
        for ways in (1, 2, 4, 8, 16)
    }
    for ways, found in errors.items():
        assert all(a <= 1.5 * b + 1e-3 for a, b in zip(found, errors[1])), (ways, found, errors[1])


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (torch.randn(1, 1, 64, 8) * 200 for _ in range(3))
    one, many = (attend(q, k, v, ways, Scores(True, None, 1.0)) for ways in (1, 8))
    assert all(torch.isfinite(x).all() for x in many)
    torch.testing.assert_close(one[0], many[0], rtol=1e-4, atol=1e-2)
