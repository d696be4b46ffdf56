"""Pipelines: the whole zoo with every schedule, at 2, 3 and 4 stages and 1, 2, 5 and 8 micro-batches."""

from __future__ import annotations

import pytest

from tests.sweeps.grid import FLAT, MODELS, check, deep, mixes_samples, strategy

LAYERS = 6
SEGMENTS = {
    "resnet-tiny": 4, "c01_tied_pp": 6, "c04_mask_boundary": 6, "c06_frozen_front": 6, "c08_uneven_tokens": 5,
    "c12_dropout": 4, "c15_gqa_small": 4, "c16_fused_qkv": 5, "c20_padding_idx": 5, "c33_doc_mask": 4,
    "c36_label_shift": 4, "c43_inplace": 7,
}  # fmt: skip
"""Of how many segments a stage can begin, for the models that have fewer than eight."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "auto")
WITH = {
    "tp=2": strategy("tensor over tp", style="auto", sequence="on"),
    "dp=2 stage 1": strategy("zero over dp", stage=1, bucket="2KB"),
    "dp=2 stage 3": strategy("zero over dp", stage=3, bucket="2KB"),
}


def sweep(name: str, mesh: str, schedule: str, parts: int, *others: str) -> None:
    statements = (strategy("pipeline over pp", schedule=schedule, microbatches=parts), *others)
    if name in FLAT:
        statements += ('segment "*"',)
    batch = 20 if parts == 5 else 16  # what divides, since some models calculate with the number of rows
    check(deep(name, LAYERS), mesh, *statements, batch=batch, refused=refusal(name, int(mesh[3]), schedule, parts))


def refusal(name: str, ranks: int, schedule: str, parts: int) -> str | None:
    """The code of the diagnostic for a pipeline that cannot be."""
    if parts > 1 and mixes_samples(name):
        return "E202"
    if schedule == "dualpipe_v" and parts < 2 * ranks:
        return "E220"  # its micro-batches come from both ends
    stages = ranks * (2 if schedule in ("interleaved", "zb_v", "dualpipe_v") else 1)
    return "E232" if stages > SEGMENTS.get(name, 8) else None


@pytest.mark.parametrize("parts", [1, 2, 5, 8])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_schedules(name: str, schedule: str, ranks: int, parts: int) -> None:
    sweep(name, f"pp={ranks}", schedule, parts)


@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize("other", WITH)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_with_another_axis(name: str, schedule: str, other: str, parts: int) -> None:
    sweep(name, f"pp=2 {other.split()[0]}", schedule, parts, WITH[other])
