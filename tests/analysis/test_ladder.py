"""The ladder of a plan: its rungs, and which of them is named when one breaks."""

from __future__ import annotations

from unittest import mock

from compiler.analysis import ladder
from compiler.analysis.verify import Deviation, Verdict
from compiler.cli import main
from compiler.dsl import loads
from tests.zoo import get, plan_text

EXTRA = """zero over dp { stage = 2, bucket = 4KB }
tensor over tp { style = auto }
pipeline over pp { schedule = 1f1b, microbatches = 2 }
recompute "layers.*" = selective
clip grad_norm = 0.5"""


def text(extra: str = EXTRA) -> str:
    return plan_text(get("llama-tiny"), batch=4, mesh="pp=2 dp=2 tp=2", microbatches=1, extra=extra)


def test_rungs_add_one_strategy_each() -> None:
    found = list(ladder.rungs(loads(text(), "p.plan")))
    assert [rung.added for rung in found] == [
        "one device", "data over dp", "zero over dp", "tensor over tp", "pipeline over pp", "recompute", "clip",
    ]  # fmt: skip
    assert [rung.plan.ranks for rung in found] == [1, 2, 2, 4, 8, 8, 8]
    assert [rung.plan.microbatches for rung in found] == [1, 1, 1, 1, 2, 2, 2]
    assert found[0].plan.clip is None and found[-1].plan == loads(text(), "p.plan")


def test_the_first_rung_that_breaks_is_named(tmp_path, capsys) -> None:
    (tmp_path / "p.plan").write_text(text())

    def broken(plan, steps):
        return Verdict((Deviation("loss of step 1", 1.0 if plan.tensor is not None else 0.0),), plan.ranks, steps)

    with mock.patch.object(ladder, "verify", broken):
        assert main(["verify", str(tmp_path / "p.plan"), "--ladder"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "the first to break: tensor over tp" and "pipeline" not in out


def test_a_sound_plan_climbs_to_the_top(tmp_path, capsys) -> None:
    (tmp_path / "p.plan").write_text(text("zero over dp { stage = 1, bucket = 4KB }"))
    assert main(["verify", str(tmp_path / "p.plan"), "--ladder", "--steps", "1", "--set", "pp=1", "--set", "tp=1"]) == 0
    assert capsys.readouterr().out.count("ok ") == 3
