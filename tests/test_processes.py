"""All strategies in real processes over gloo: the losses and norms of a run do not depend on the mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLAN = ROOT / "dsl_examples" / "all_five.plan"


def train(folder: Path, *sizes: str) -> list[tuple[float, float]]:
    """(loss, norm of the gradients) of each step of a short run."""
    folder.mkdir()
    # The file stays where it is: its own folder is where it looks for models.
    plan = folder / "five.plan"
    plan.write_text(PLAN.read_text().replace("steps = 20", "steps = 3"))
    command = [sys.executable, "-m", "compiler.cli", "run", str(plan)]
    command += [word for size in sizes for word in ("--set", size)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "runs" / "five" / "log.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    return train(tmp_path_factory.mktemp("alone") / "run", "pp=1", "dp=1", "cp=1", "tp=1")


@pytest.mark.parametrize(
    "sizes",
    [
        ("pp=2", "dp=1", "cp=1", "tp=2"),
        ("pp=1", "dp=2", "cp=2", "tp=1"),
        pytest.param(("pp=2", "dp=2", "cp=1", "tp=1"), marks=pytest.mark.full),
        pytest.param(("pp=1", "dp=1", "cp=2", "tp=2"), marks=pytest.mark.full),
        pytest.param(("pp=2", "dp=1", "cp=2", "tp=2"), marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_four_processes_train_as_one(sizes: tuple[str, ...], alone: list, tmp_path: Path) -> None:
    for (loss, norm), (wanted, wanted_norm) in zip(train(tmp_path / "run", *sizes), alone, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-4)
