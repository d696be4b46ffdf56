"""The promise: every plan computes what one device computes. The whole zoo, over ranks and micro-batches."""

from __future__ import annotations

import pytest

from compiler.analysis.verify import TOLERANCE, verify
from compiler.diagnostics import PlanError
from compiler.dsl import loads
from tests.zoo import ZOO, ZooModel, plan_text, select

MESHES = (1, 2, 3, 4, 8)
MICROBATCHES = (1, 2, 4)
NARROW = {(2, 1), (2, 2), (3, 1), (4, 2)}


def sweep() -> list:
    cases = []
    for entry in ZOO:
        if "branch" in entry.traits:
            continue
        for ranks in MESHES:
            for parts in MICROBATCHES:
                chosen = (ranks, parts) in NARROW and entry.size == "tiny" or (ranks, parts) == (2, 2)
                marks = () if chosen else (pytest.mark.full,)
                cases.append(pytest.param(entry, ranks, parts, marks=marks, id=f"{entry.name}-dp{ranks}-m{parts}"))
    return cases


@pytest.mark.parametrize(("entry", "ranks", "parts"), sweep())
def test_equal_to_one_device(entry: ZooModel, ranks: int, parts: int) -> None:
    batch = ranks * parts * (2 if ranks * parts < 8 else 1)
    text = plan_text(entry, batch=max(batch, 4), mesh=f"dp={ranks}", microbatches=parts)
    plan = loads(text, f"{entry.name}.plan")
    if "batchnorm" in entry.traits and parts > 1:
        with pytest.raises(PlanError, match="mixes the samples"):
            verify(plan)
        return
    try:
        verdict = verify(plan)
    except PlanError:
        if entry.expect == "equal_or_diagnostic" and entry.name == "c46_vmap_mask":
            return
        raise
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


@pytest.mark.parametrize("entry", select(size="tiny", branch=False, batchnorm=False)[:6], ids=lambda e: e.name)
def test_batch_that_does_not_divide(entry: ZooModel) -> None:
    """7 rows on 2 ranks in 2 micro-batches: padded, masked, exact."""
    verdict = verify(loads(plan_text(entry, batch=7, mesh="dp=2", microbatches=2), "odd.plan"))
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


def test_clipping_and_decay_groups() -> None:
    entry = next(e for e in ZOO if e.name == "gpt-tiny")
    text = plan_text(
        entry, mesh="dp=2", microbatches=2, extra="clip grad_norm = 0.1",
        optimizer='optimizer adamw { lr = 1e-2, weight_decay = 0.3, no_decay "**.bias", "**norm**" }',
    )  # fmt: skip
    verdict = verify(loads(text, "clip.plan"))
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)
