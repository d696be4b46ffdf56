"""Explanations name the rule, the model's line and the plan's, for everything that is sent."""

from __future__ import annotations

import json
from functools import cache

import pytest

from compiler.analysis.dry_run import DryRun, dry_run
from compiler.analysis.explain import Explanation, explain, known_names
from compiler.analysis.traffic import read_traffic
from compiler.cli import main
from compiler.driver import Compilation, compile
from compiler.dsl import loads
from tests.analysis.plans import LLAMA, plan_of
from tests.zoo import get, plan_text


@cache
def compiled(name: str) -> tuple[Compilation, DryRun]:
    compilation = compile(plan_of(name))
    return compilation, dry_run(compilation)


def about(name: str, plan: str) -> list[Explanation]:
    return [part for item in explain(*compiled(plan)) if (part := item.about(name)) is not None]


@pytest.mark.parametrize("plan", ["tp-sequence", "zero-tp", "dropout"])
def test_everything_is_explained(plan: str):
    found = explain(*compiled(plan))
    assert sum(item.sent for item in found) == read_traffic(compiled(plan)[1]).sent
    for item in found:
        assert item.story.reasons and all("the instruction communicates" not in reason for reason in item.story.reasons)
        assert item.causes, item.flows[0]


def test_row_layer():
    """Forward: a term of a sum on each rank, scattered along the sequence; the plan's line is that of the pattern."""
    forward = next(item for item in about("layers.0.attn.wo", "tp-sequence") if item.flows[0].op == "forward")
    assert forward.flows[0].kind == "reduce_scatter"
    assert {flow.target for flow in forward.flows} == {"layers.0"}
    assert any("tp cuts `k`, which it sums over" in reason for reason in forward.story.reasons)
    (cause,) = forward.causes
    text = compiled("tp-sequence")[0].plan.text.splitlines()[cause.span.line - 1]
    assert cause.text == 'row "layers.*.attn.wo"' and text.strip().startswith("row")
    assert forward.story.origin.source.startswith("dsl_examples/models/llama.py:")


def test_parameter_and_value_names():
    """A parameter is asked for by its name, a value by that of the whole graph; so is a pattern."""
    gradients = {item.flows[0].op for item in about("layers.1.mlp.w2.weight", "zero-tp")}
    assert {"gather", "reduce"} <= gradients
    main_graph = compiled("tp-sequence")[0].assigned.main
    gathered = next(node for node in main_graph.nodes if node.op == "planc.all_gather")
    name = gathered.outputs[0].name
    assert name in known_names(compiled("tp-sequence")[0])
    assert any(item.flows[0].kind == "all_gather" for item in about(name, "tp-sequence"))
    assert len(about("layers.*.attn.*", "tp-sequence")) > len(about("layers.0.attn.wo", "tp-sequence"))


def test_inconsistent_style_shows_its_price():
    """Columns behind columns: the output projection needs its whole input, which costs a gather; and who is to blame."""
    wrong = (LLAMA % "off").replace('row    "layers.*.attn.wo", "layers.*.mlp.w2"', 'column "layers.*.attn.wo"')
    compilation = compile(loads(plan_text(get("llama-small"), 8, "tp=2", extra=wrong)))
    found = [part for item in explain(compilation, dry_run(compilation)) if (part := item.about("layers.0.attn.wo"))]
    gathers = [item for item in found if item.flows[0].kind == "all_gather" and item.flows[0].op == "forward"]
    assert gathers and any(cause.text == 'column "layers.*.attn.wo"' for item in gathers for cause in item.causes)


def test_recomputed_communication():
    """Full recomputation communicates again, and that is said; selective recomputation gathers again, but sums nothing
    again."""
    again = [i for i in about("all", "tp-full") if "recomputation" in i.story.reasons[0]]
    assert again and all(item.flows[0].op == "backward" for item in again)
    again = [i for i in about("all", "tp-sequence") if "recomputation" in i.story.reasons[0]]
    assert again and all(item.flows[0].kind == "all_gather" for item in again)


# -- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def plan(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.plan").write_text(plan_text(get("llama-tiny"), 8, "dp=2"))
    return "x.plan"


def test_command(plan: str, capsys: pytest.CaptureFixture):
    assert main(["explain", "embed.weight", plan]) == 0
    out = capsys.readouterr().out
    assert "all_reduce over dp" in out and "plan    data over dp  x.plan:" in out
    assert main(["explain", "all", plan, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["communications"]
    assert {item["instruction"] for item in found} >= {"reduce", "report"}
    assert all(item["because"] and item["plan"] for item in found)


def test_totals_are_a_ranks(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """No rank sends what all stages send together: each has a total, the one that the traffic reader finds."""
    monkeypatch.chdir(tmp_path)
    plan = plan_of("pipeline-zero")
    (tmp_path / "x.plan").write_text(plan.text)
    compilation = compile(plan)
    wanted = [read_traffic(dry_run(compilation, stage)) for stage in range(2)]
    sums = [{"stage": w.stage, "calls": sum(f.calls for f in w.flows), "sent": w.sent} for w in wanted]
    assert main(["explain", "all", "x.plan", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["totals"] == sums
    assert {item["stage"] for item in found["communications"]} == {0, 1}
    assert main(["explain", "all", "x.plan"]) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{sums[0]['calls']} communications a step") and first.endswith("sent by a rank of stage 0")
    assert second.startswith(f"{sums[1]['calls']} communications a step") and second.endswith("sent by a rank of stage 1")
    assert main(["inspect", "x.plan", "--html", "x.html"]) == 0
    assert "<summary>stage 1: " in (tmp_path / "x.html").read_text()
    assert main(["compile", "x.plan", "--json"]) == 0
    compiled = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert f", {compiled['distinct_segments']} distinct" in (tmp_path / "x.html").read_text()


def test_unknown_name(plan: str, capsys: pytest.CaptureFixture):
    assert main(["explain", "layers.0.atn.wq", plan]) == 2
    assert "did you mean layers.0.attn.wq?" in capsys.readouterr().err


def test_nothing_communicated(plan: str, capsys: pytest.CaptureFixture):
    assert main(["explain", "layers.0", plan, "--set", "dp=1"]) == 0
    assert "nothing is communicated" in capsys.readouterr().out
