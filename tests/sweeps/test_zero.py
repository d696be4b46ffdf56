"""ZeRO: the whole zoo at each stage, rank count and number of micro-batches, in hybrid form, and with tensor parallelism."""

from __future__ import annotations

import pytest

from tests.sweeps.grid import MODELS, check, mixes_samples, strategy
from tests.zoo import get


def zero(stage: int, **options: object) -> str:
    """Buckets are small, so that even a tiny model has several."""
    return strategy("zero over dp", stage=stage, bucket="2KB", **options)


def sweep(name: str, mesh: str, parts: int, *statements: str) -> None:
    refused = "E202" if parts > 1 and mixes_samples(name) else None
    check(get(name), mesh, *statements, batch=36 if mesh == "dp=3" else 32, parts=parts, refused=refused)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_stages(name: str, stage: int, ranks: int, parts: int) -> None:
    sweep(name, f"dp={ranks}", parts, zero(stage))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_hybrid(name: str, stage: int, parts: int) -> None:
    sweep(name, "dp=4", parts, zero(stage, hybrid=2))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_with_tensor_parallelism(name: str, stage: int, parts: int) -> None:
    sweep(name, "dp=2 tp=2", parts, zero(stage), strategy("tensor over tp", style="auto"))
