"""Cuts: whatever the order, the parts of all ranks are the tensor, and all functions agree on which they are."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from runtime.cuts import Cut, join_parts, parse_cuts, positions, put_part, runs, split_parts, take_part

SIZES = {"a": 2, "b": 3}
ORDERS = ("", "zigzag", "pieces")


def random_cut(rng: random.Random, order: str, axes: tuple[str, ...] = ("a", "b")) -> Cut:
    """A cut of dimension 1; pieces of different lengths divide, other orders need not."""
    ways = math.prod(SIZES[axis] for axis in axes)
    outer, unit, count = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 20)
    if order == "pieces":
        lengths = [rng.randint(1, 4) for _ in range(rng.randint(2, 4))]
        order, count = "+".join(map(str, lengths)), sum(lengths) * ways * rng.randint(1, 2)
    return Cut(1, axes, outer, count, unit, order)


def tensor_of(cut: Cut) -> Tensor:
    size = cut.outer * cut.count * cut.unit
    return torch.arange(1, 2 * size * 3 + 1).view(2, size, 3)


def every_rank(cut: Cut) -> list[dict[str, int]]:
    points = itertools.product(*(range(SIZES[axis]) for axis in cut.axes))
    return [dict(zip(cut.axes, point, strict=True)) for point in points]


CASES = [(order, seed) for order in ORDERS for seed in range(20)]


@pytest.mark.parametrize(("order", "seed"), CASES)
def test_parts_are_the_tensor(order: str, seed: int) -> None:
    cut = random_cut(random.Random(seed), order)
    x, ranks = tensor_of(cut), every_rank(cut)
    parts = split_parts(x, cut, len(ranks))
    assert torch.equal(join_parts(parts, cut), x)
    assert parts.shape[2] == cut.outer * cut.length(len(ranks)) * cut.unit
    total = torch.zeros_like(x)
    for part, at in zip(parts, ranks, strict=True):
        assert torch.equal(part, take_part(x, cut, SIZES, at))
        assert torch.equal(part, x[:, positions([cut], x.shape[1], SIZES, at)])
        total += put_part(part, cut, SIZES, at)
    assert torch.equal(total, x)


@pytest.mark.parametrize(("order", "seed"), CASES)
def test_runs_are_what_is_real(order: str, seed: int) -> None:
    cut = random_cut(random.Random(seed), order)
    x, seen = tensor_of(cut), torch.zeros(cut.outer * cut.count * cut.unit, dtype=torch.long)
    for at in every_rank(cut):
        part = take_part(x, cut, SIZES, at, zeros=True)
        where = positions([cut], x.shape[1], SIZES, at, mark_padding=True)
        held = runs([cut], x.shape[1], SIZES, at)
        assert sum(run.length for run in held) == int((where >= 0).sum())
        for run in held:
            assert torch.equal(part.narrow(1, run.local, run.length), x.narrow(1, run.start, run.length))
            seen[run.start : run.start + run.length] += 1
    assert seen.eq(1).all()


@pytest.mark.parametrize("seed", range(20))
def test_pieces_nest(seed: int) -> None:
    """To cut over one axis and then over another is to cut over both."""
    both = random_cut(random.Random(seed), "pieces")
    x = tensor_of(both)
    first = Cut(1, ("a",), both.outer, both.count, both.unit, both.order)
    then = Cut(1, ("b",), both.outer, both.count // SIZES["a"], both.unit, both.order)
    for at in every_rank(both):
        twice = take_part(take_part(x, first, SIZES, at), then, SIZES, at)
        assert torch.equal(twice, take_part(x, both, SIZES, at))


def test_an_example() -> None:
    """Heads of queries, keys and values: two ranks, of which each has half of each."""
    cut = Cut(0, ("a",), 1, 6, 8, "4+1+1")
    with pytest.raises(ValueError, match="do not divide"):
        cut.chunk(2)
    cut = Cut(0, ("a",), 1, 48, 1, "4+1+1")
    assert [cut.spans(SIZES, {"a": rank}) for rank in range(2)] == [
        ((0, 16), (32, 4), (40, 4)),
        ((16, 16), (36, 4), (44, 4)),
    ]
    assert parse_cuts(str(cut)) == (cut,)
