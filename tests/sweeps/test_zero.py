"""ZeRO: the whole zoo at each stage, rank count and number of micro-batches, in hybrid form, and with tensor parallelism."""

from __future__ import annotations

import pytest

from tests.sweeps.grid import MODELS, check, strategy
from tests.zoo import get

BATCH = {2: 32, 3: 36, 4: 32, 8: 32}


def zero(stage: int, **options: object) -> str:
    """Buckets are small, so that even a tiny model has several."""
    return strategy("zero over dp", stage=stage, bucket="2KB", **options)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_stages(name: str, stage: int, ranks: int, parts: int) -> None:
    check(get(name), f"dp={ranks}", zero(stage), batch=BATCH[ranks], parts=parts)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_hybrid(name: str, stage: int, parts: int) -> None:
    check(get(name), "dp=4", zero(stage, hybrid=2), batch=32, parts=parts)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_with_tensor_parallelism(name: str, stage: int, parts: int) -> None:
    check(get(name), "dp=2 tp=2", zero(stage), strategy("tensor over tp", style="auto"), batch=32, parts=parts)
