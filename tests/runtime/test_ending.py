"""What a run suggests at its end can be typed as it stands."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from compiler.driver import compile
from compiler.dsl import load
from runtime import ending
from runtime.ending import Found, Outcome, next_commands, other_mesh
from runtime.program import load as load_program
from tests.runtime.handmade import write_program
from tests.zoo import get, plan_text

DONE = Outcome(0, 10, (1.0,))


def found(checkpoint: str | None = None) -> Found:
    return Found(Path("log.jsonl"), None if checkpoint is None else Path(checkpoint))


def test_other_meshes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Twice the data parallelism where rows and processors are enough, else one rank on the longest axis."""
    monkeypatch.setattr(ending.os, "cpu_count", lambda: 2)
    assert other_mesh(write_program(tmp_path / "a", dp=2)) == " --set dp=4"
    assert other_mesh(write_program(tmp_path / "b", dp=2, rows=6)) == " --set dp=1"
    assert other_mesh(write_program(tmp_path / "c", dp=4)) == " --set dp=1"
    assert other_mesh(write_program(tmp_path / "d", dp=1, tp=4)) == " --set tp=1"
    assert other_mesh(write_program(tmp_path / "e", dp=1)) == ""


def test_longer(tmp_path: Path):
    """What bounds the run is moved, be it steps or epochs; the plan's own options stay."""
    program = write_program(tmp_path / "p", dp=2)
    commands = next_commands(program, DONE, found("runs/x/step-10"), "x.plan --set batch=12")
    assert any(c.startswith("planc run x.plan --set batch=12 --resume --set dp=") for c in commands)
    program = dataclasses.replace(program, train={**program.train, "epochs": 2})
    commands = next_commands(program, DONE, found("runs/x/step-10"), "x.plan")
    assert any(c.endswith(" --set train.steps=20 --set train.epochs=4") for c in commands)


@pytest.mark.parametrize("mesh, extra", [("dp=1", ""), ("pp=2", "pipeline over pp { schedule = 1f1b, microbatches = 2 }")])
def test_from_the_folder(mesh: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The program's folder alone leads to its plan, and what is suggested compiles; not if the plan has changed."""
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    path = Path("plans/net.plan")
    path.write_text(plan_text(get("llama-tiny"), 8, mesh, extra=extra))
    program = load_program(compile(str(path)).write(Path("build/net")))
    commands = [shlex.split(c) for c in next_commands(program, DONE, found(), None)]
    assert [c[1] for c in commands[:2]] == ["inspect", "verify"] and all(c[2] == str(path) for c in commands)
    for _, _, plan, *options in commands:
        compile(load(plan, [item for flag, item in zip(options, options[1:]) if flag == "--set"]))
    path.write_text(path.read_text() + "\n# changed\n")
    assert not next_commands(program, DONE, found(), None)
