"""Whatever is asked for together: a plan equals one device, or is refused for a reason that is the plan's."""

from __future__ import annotations

import pytest

from compiler.analysis.verify import verify
from compiler.diagnostics import PlanError
from compiler.dsl import loads
from tests.sweeps.grid import TIMEOUT
from tests.sweeps.random_plans import random_plan

REFUSALS = {
    "E202": "batch statistics over micro-batches",
    "E203": "fewer heads than ranks that exchange them",
    "E204": "a batch that does not divide, of a model that calculates with its size",
    "E220": "a schedule with too few micro-batches",
    "E232": "more stages than layers",
}


@pytest.mark.parametrize("seed", range(400))
def test_a_random_plan(seed: int) -> None:
    text = random_plan(seed)
    try:
        verdict = verify(loads(text, "random.plan"), steps=2, timeout=TIMEOUT)
    except PlanError as error:
        assert {d.code for d in error.diagnostics} <= REFUSALS.keys(), f"{error}\n{text}"
        return
    assert verdict.ok, f"{verdict.worst}\n{text}"
