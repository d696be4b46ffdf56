"""`recompute … = fit(…)`: the limit is kept, nothing is recomputed without need, and an impossible limit is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from compiler.analysis.dry_run import dry_run
from compiler.analysis.memory import read_memory
from compiler.analysis.verify import random_batch, verify
from compiler.diagnostics import PlanError, render
from compiler.driver import Compilation, compile
from compiler.dsl import loads
from compiler.dsl.plan import Plan
from runtime.program import load
from tests.analysis.tracking import observe
from tests.zoo import get, plan_text


SHARES = (0.0, 0.4, 0.8)


def plan(policy: str, mesh: str = "dp=2") -> Plan:
    return loads(plan_text(get("llama-small"), 8, mesh, extra=f'recompute "layers.*" = {policy}'))


@cache
def fitted(limit: int) -> Compilation:
    return compile(plan(f"fit({limit}B)"))


def between(bounds: tuple[int, int], share: float) -> int:
    """A limit so far from the smallest to the largest."""
    return int(bounds[0] + share * (bounds[1] - bounds[0]))


def peak(compilation: Compilation) -> int:
    return read_memory(dry_run(compilation)).peak.bytes


@pytest.fixture(scope="module")
def bounds() -> tuple[int, int]:
    """The peaks with everything recomputed, and with nothing."""
    return peak(compile(plan("full"))), peak(compile(plan("none")))


@pytest.mark.parametrize("share", SHARES)
def test_the_limit_is_kept(share: float, bounds: tuple[int, int], tmp_path: Path):
    limit = between(bounds, share)
    found = fitted(limit)
    assert found.fitted is not None and found.fitted.peak <= limit
    assert set(found.fitted.policies) == {f"layers.{k}" for k in range(4)}
    program = load(found.write(tmp_path / "program"))
    truth = observe(program, random_batch(program, 0))[0]
    assert max(most for _, _, most in truth.moments) == found.fitted.peak
    assert any(item.request.startswith("recompute") and item.outcome == "applied" for item in found.asked)


def test_nothing_without_need(bounds: tuple[int, int]):
    found = fitted(bounds[1]).fitted
    assert found is not None and set(found.policies.values()) == {"none"}


def test_more_room_never_recomputes_more(bounds: tuple[int, int]):
    """What is recomputed shrinks as the limit grows: the order of the moves is one."""
    rank = {"none": 0, "selective": 1, "full": 2}
    sums = []
    for share in SHARES:
        found = fitted(between(bounds, share)).fitted
        assert found is not None
        sums.append(sum(rank[policy] for policy in found.policies.values()))
    assert sums == sorted(sums, reverse=True) and sums[0] > sums[-1]


def test_too_small_is_refused_with_the_nearest_figure(bounds: tuple[int, int]):
    with pytest.raises(PlanError) as caught:
        compile(plan("fit(1MB)"))
    text = render(caught.value.diagnostics, caught.value.sources)
    assert "E206" in text and "1MB are allowed" in text and "fit(1MB)" in text
    assert "MB on its fullest rank" in text


def test_the_meaning_stays(bounds: tuple[int, int]):
    assert verify(plan(f"fit({between(bounds, 0.5)}B)"), steps=1).ok
