"""What a run writes: refused before it begins where it cannot be written, or where another run writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.__main__ import main
from runtime.errors import TrainError
from runtime.log import JsonLog, read_log
from runtime.run_files import LOCK, RunFiles
from runtime.train import train
from runtime.transport import LocalTransport, run_ranks
from tests.runtime.handmade import write_bigram

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").touch()
    return tmp_path


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("options", "trace", "message"),
    [
        (
            {"directory": "file"},
            None,
            "the run's folder file: file is no folder; choose another: train { directory = … }",
        ),
        ({"directory": "file/x"}, None, "the run's folder file/x: Not a directory"),
        ({"log": "/dev/full"}, None, "the log /dev/full: No space left on device; choose another: train { log = … }"),
        ({"log": "build"}, None, "the log build: Is a directory"),
        ({}, "file/trace.json", "the trace file/trace.json: file is no folder; choose another: --trace FILE"),
    ],
)
def test_what_cannot_be_written(capsys, ranks: int, options: dict[str, str], trace: str | None, message: str) -> None:
    """On one rank by `train` itself, on more of them before they are started."""
    write_bigram(Path("build/p"), ranks, **options)
    assert main(["build/p", *(["--trace", trace] if trace else [])]) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"planc: cannot write {message}") and err.count("\n") == 1 and not out


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_permission(capsys) -> None:
    Path("closed").mkdir(mode=0o555)
    write_bigram(Path("build/p"), directory="closed")
    assert main(["build/p"]) == 1
    assert "cannot write the run's folder closed: Permission denied" in capsys.readouterr().err


def test_a_log_that_fails_later(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFiles, "check", lambda self: self.directory.mkdir(parents=True))
    write_bigram(Path("build/p"), log="/dev/full")
    assert train("build/p", transport=LocalTransport()) == 1
    err = capsys.readouterr().err
    assert "failed in 'write the log'" in err and "cannot write /dev/full: No space left on device" in err
    assert "Traceback" not in err


def test_one_run_in_a_folder(capsys) -> None:
    """The second is refused and changes nothing; the claim of a process that was killed means nothing."""
    write_bigram(Path("build/p"), steps=2)
    with JsonLog("runs/bigram/log.jsonl") as log:
        log.write(1, loss=0.5)
    hold = "import sys, pathlib, time; from runtime.run_files import RunFiles; f = pathlib.Path('runs/bigram')\n"
    hold += "with RunFiles(f, f / 'log.jsonl').claimed(): print('held', flush=True); time.sleep(60)"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", hold], env=env, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        assert train("build/p", transport=LocalTransport()) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"planc: runs/bigram is in use by another run (process {other.pid} on ")
        assert "train { directory = … }" in err
        assert read_log("runs/bigram/log.jsonl") == [{"step": 1, "loss": 0.5}]
        other.kill()
    assert (Path("runs/bigram") / LOCK).read_text().startswith(f"process {other.pid}")
    assert train("build/p", transport=LocalTransport()) == 0
    assert len(read_log("runs/bigram/log.jsonl")) == 2


def test_all_ranks_are_refused(capsys) -> None:
    write_bigram(Path("build/p"), 2)
    with RunFiles(Path("runs/bigram"), Path("runs/bigram/log.jsonl")).claimed():
        assert run_ranks(2, lambda transport: train("build/p", transport=transport)) == [1, 1]
    err = capsys.readouterr().err
    assert err.startswith("planc: rank 0: runs/bigram is in use by another run (process ") and err.count("\n") == 1


def test_a_claim_ends_with_its_run() -> None:
    files = RunFiles(Path("run"), Path("run/log.jsonl"))
    with files.claimed(), pytest.raises(TrainError, match="in use"), files.claimed():
        pass
    with files.claimed():
        pass
