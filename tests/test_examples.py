"""The example plans: all of them are right, and the small ones compile as they stand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import dsl_examples
from compiler.analysis.verify import random_batch
from compiler.driver import compile
from compiler.dsl import load
from runtime.program import load as load_program
from runtime.simulate import simulate

PLANS = sorted(Path(dsl_examples.__file__).parent.glob("*.plan"))
LARGE = ("llama3_", "hf_")


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_plan_is_right(path: Path) -> None:
    plan = load(str(path))
    assert not plan.warnings


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem in ("pipeline", "tensor") else pytest.mark.full, id=path.stem)
        for path in PLANS
        if not path.stem.startswith(LARGE)
    ],
)
def test_small_plans_compile_and_run(path: Path, tmp_path: Path) -> None:
    compilation = compile(str(path))
    assert not any(asked.outcome == "refused" for asked in compilation.asked)
    program = load_program(compilation.write(tmp_path / "program"))
    results = simulate(program, lambda session: session.step(random_batch(program, 0)))
    assert math.isfinite(results[0].loss) and len({result.loss for result in results}) == 1
