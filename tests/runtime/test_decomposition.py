"""Matrix products in pieces compute what gathering, multiplying and reducing one after the other does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.cuts import Cut, split_parts
from runtime.decomposition import gather_matmul, matmul_reduce, matmul_scatter, spans
from runtime.transport import InProcessTransport, run_ranks

SHAPES = [(1, 8), (1, 7), (3, 8), (4, 7), (2, 1)]  # (B, rows)
WAYS = [2, 3]
ORDERS = ["", "zigzag"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_spans_cover_everything_once() -> None:
    for size in range(1, 12):
        for count in range(1, 6):
            found = list(spans(size, count))
            assert [k for span in found for k in range(span.start, span.stop)] == list(range(size))
            assert len(found) == min(size, count)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize(("lead", "count"), SHAPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("keep", [False, True])
def test_gather_matmul(ways: int, lead: int, count: int, keep: bool, order: str) -> None:
    whole, a, b, bias = normal(lead, count, 5), normal(5, 4, seed=1), normal(3, 5, seed=2).t(), normal(3, seed=3)
    cut = Cut(1, ("tp",), 1, count, 1, order)
    parts = split_parts(whole, cut, ways)
    group = tuple(range(ways))

    def rank(transport: InProcessTransport) -> tuple[Tensor | None, list[Tensor]]:
        x = parts[transport.rank]
        return gather_matmul(transport, group, x, cut, ((a,), (b, bias)), keep, 3, "test")

    for found, (first, second) in run_ranks(ways, rank):
        assert (found is not None) == keep and (found is None or torch.equal(found, whole))
        torch.testing.assert_close(first, whole.flatten(0, 1) @ a)
        torch.testing.assert_close(second, whole.flatten(0, 1) @ b + bias)
        assert first.is_contiguous() and second.is_contiguous()


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize(("lead", "count"), SHAPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("zeros", [False, True])
def test_matmul_scatter(ways: int, lead: int, count: int, zeros: bool, order: str) -> None:
    xs, factor = [normal(lead, count, 5, seed=k) for k in range(ways)], normal(4, 5, seed=9).t()
    rests = [(normal(lead, count, 4, seed=5 + k), *(() if zeros else (normal(4, seed=7),))) for k in range(ways)]
    group, cut = tuple(range(ways)), Cut(1, ("tp",), 1, count, 1, order)

    def rank(transport: InProcessTransport) -> Tensor:
        k = transport.rank
        return matmul_scatter(transport, group, xs[k], cut, factor, rests[k], zeros, 3, "test")

    total = sum(x @ factor + sum(rest) for x, rest in zip(xs, rests))
    for found, expected in zip(run_ranks(ways, rank), split_parts(total, cut, ways, zeros)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("keep", [False, True])
def test_matmul_reduce(keep: bool) -> None:
    xs, factor, bias = [normal(7, 5, seed=k) for k in range(3)], normal(5, 4, seed=8), normal(4, seed=9)
    rests = [normal(7, 4, seed=5 + k) for k in range(3)]

    def rank(transport: InProcessTransport) -> tuple[Tensor | None, Tensor]:
        k = transport.rank
        return matmul_reduce(transport, (0, 1, 2), xs[k], factor, (rests[k], bias), keep, 4, "test")

    terms = [x @ factor + rest + bias for x, rest in zip(xs, rests)]
    for (here, found), term in zip(run_ranks(3, rank), terms):
        assert (here is not None) == keep
        if here is not None:
            torch.testing.assert_close(here, term)
        torch.testing.assert_close(found, sum(terms))
