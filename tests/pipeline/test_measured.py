"""Stages weighed by a trace instead of by predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiler.diagnostics import PlanError
from compiler.driver import compile
from compiler.dsl import loads
from tests.zoo import get, plan_text


def trace(path: Path, seconds: dict[str, float]) -> None:
    events = [
        {"ph": "X", "cat": op, "name": f"{op} {call} @0", "dur": 1e6 * took * (2 if op == "backward" else 1)}
        for call, took in seconds.items()
        for op in ("forward", "backward")
    ]
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}))


def stages(tmp_path: Path, name: str = "trace.json") -> list[tuple[str, ...]]:
    extra = f'pipeline over pp {{ schedule = 1f1b, microbatches = 2, times = "{name}" }}'
    plan = loads(plan_text(get("llama-small"), batch=4, mesh="pp=2", microbatches=1, extra=extra), str(tmp_path / "p.plan"))
    return [stage.calls for stage in compile(plan).linked.staging.assignment.stages]


def test_a_slow_layer_gets_a_stage_of_its_own(tmp_path: Path) -> None:
    even = {"begin": 1e-3, **{f"layers.{k}": 1e-3 for k in range(4)}, "end": 1e-3}
    trace(tmp_path / "trace.json", even)
    assert stages(tmp_path)[0] == ("begin", "layers.0", "layers.1")
    trace(tmp_path / "trace.json", even | {"layers.0": 1.0})
    assert stages(tmp_path)[0] == ("begin", "layers.0")


def test_what_a_trace_does_not_show_is_scaled(tmp_path: Path) -> None:
    trace(tmp_path / "trace.json", {"layers.1": 1.0})
    assert len(stages(tmp_path)) == 2


@pytest.mark.parametrize(
    "text, message",
    [(None, "cannot read"), ("{", "is no trace"), ('{"traceEvents": []}', "shows none of the segments")],
)
def test_traces_that_are_none(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "trace.json").write_text(text)
    with pytest.raises(PlanError, match=message):
        stages(tmp_path)
