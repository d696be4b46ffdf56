"""The command line: every command and flag, what it prints and its exit status. In this process wherever possible."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from compiler import version
from compiler.cli import LEVEL_NAMES, main, parser
from runtime.executor import Executor
from runtime.instructions import Instruction

ROOT = Path(__file__).parent.parent
PLAN = """\
model "net.py:Net"

batch = 8
input x : float32[batch, 4]
input y : float32[batch]

mesh dp=2
data over dp { microbatches = 2 }
optimizer sgd { lr = 0.1 }
clip grad_norm = 1.0
train { data = "synthetic", steps = 4, save_every = 2 }
"""
NET = """\
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.head = nn.Linear(4, 1)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x).relu()
        return {"loss": F.mse_loss(self.head(x).squeeze(1), y), "mean": x.mean()}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own folder with a plan and its model."""
    (tmp_path / "tiny.plan").write_text(PLAN)
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


Captured = pytest.CaptureFixture[str]


def planc(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    """The exit status, standard output and standard error of a command. Whatever happens, no traceback."""
    capsys.readouterr()
    status = main(arguments)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return status, out, err


def python(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **(env or {})})


# -- check, fmt -------------------------------------------------------------------------------------------------------


def test_check(capsys: Captured) -> None:
    assert planc(capsys, "check", "tiny.plan") == (0, "tiny.plan: ok (2 ranks: dp=2)\n", "")
    assert planc(capsys, "check", "tiny.plan", "--set", "dp=1")[1] == "tiny.plan: ok (1 rank: dp=1)\n"
    status, out, _ = planc(capsys, "check", "tiny.plan", "--json")
    assert status == 0 and json.loads(out) == {"diagnostics": []}


def test_check_shows_warnings_and_passes(capsys: Captured, folder: Path) -> None:
    (folder / "tiny.plan").write_text(PLAN + "unused = 3\n")
    status, out, err = planc(capsys, "check", "tiny.plan")
    assert status == 0 and "ok" in out and "W001" in err and "unused" in err
    (found,) = json.loads(planc(capsys, "check", "tiny.plan", "--json")[1])["diagnostics"]
    assert found["code"] == "W001"


MISTAKES = {
    "file": ('"net.py:Net"', '"nett.py:Net"', "E100", "did you mean `net.py`?"),
    "attribute": ("net.py:Net", "net.py:Nett", "E100", "did you mean `Net`?"),
    "module": ("net.py:Net", "nott:Net", "E100", "there is no module `nott`"),
    "what cannot be called": ("net.py:Net", "net.py:F.math", "E100", "cannot be called"),
    "option": ('"net.py:Net"', '"net.py:Net" { layer = 2 }', "E101", "did you mean `layers`?"),
    "missing option": ("net.py:Net", "net.py:nn.Linear", "E101", "needs `in_features`, `out_features`"),
    "input": ("input x", "input xx", "E103", "has no argument `xx`"),
    "input beside a loss": (
        'net.py:Net"\n\nbatch = 8\ninput x', 'net.py:Net"\nloss "net.py:F.mse_loss"\n\nbatch = 8\ninput xx',
        "E103", "did you mean `x`?",
    ),
    "loss": ('"net.py:Net"', '"net.py:Net"\nloss "net.py:lost"', "E100", "`net.py` has no `lost`"),
    "arguments of the loss": ('"net.py:Net"', '"net.py:Net"\nloss "net.py:F.tanh"', "E103", "does not fit"),
}  # fmt: skip
DATA = {
    "folder": ("text:netz", "there is no folder netz", "did you mean `text:nets`?"),
    "library": ("text:stdlb", "there is no folder stdlb", "did you mean `text:stdlib`?"),
    "kind": ("txt:stdlib", "there is no module `txt`", "did you mean `text:stdlib`?"),
    "kind and folder": ("txt:netz", "there is no module `txt`", "did you mean `text:nets`?"),
    "kind that Python has": ("test:stdlib", "`test` has no `stdlib`", "did you mean `text:stdlib`?"),
    "inputs": ("text:nets", "text needs one input int64[batch, seq]", ""),
    "function": ("net.py:rowz", "`net.py` has no `rowz`", "did you mean `rows`?"),
    "arguments": ("net.py:rows", "`net.py:rows` needs `n`", ""),
}


@pytest.mark.parametrize(("before", "after", "code", "message"), MISTAKES.values(), ids=MISTAKES)
def test_check_finds_what_compile_would(
    capsys: Captured, folder: Path, before: str, after: str, code: str, message: str
) -> None:
    """The same diagnostic, and without building anything."""
    (folder / "tiny.plan").write_text(PLAN.replace(before, after, 1))
    status, out, err = planc(capsys, "check", "tiny.plan")
    assert status == 1 and not out and f"error[{code}]" in err and message in err
    assert planc(capsys, "compile", "tiny.plan") == (1, "", err)


@pytest.mark.parametrize(("source", "message", "help"), DATA.values(), ids=DATA)
@pytest.mark.parametrize("command", ["check", "run"])
def test_check_and_run_look_for_the_data(
    capsys: Captured, folder: Path, command: str, source: str, message: str, help: str
) -> None:
    (folder / "nets").mkdir()
    (folder / "net.py").write_text(NET + "\n\ndef rows(n):\n    raise ValueError\n")
    (folder / "tiny.plan").write_text(PLAN.replace("synthetic", source))
    status, out, err = planc(capsys, command, "tiny.plan")
    assert status == 1 and not out and "error[E107]" in err and message in err and help in err
    assert " --> tiny.plan:11:" in err and not (folder / "build").exists()


def test_check_finds_everything_at_once(capsys: Captured, folder: Path) -> None:
    (folder / "trace.json").write_text("{}")
    text = PLAN.replace('"net.py:Net"', '"net.py:Nett"\nloss "net.py:lost"').replace("synthetic", "text:nowhere")
    text = text.replace("mesh dp=2", 'mesh dp=2 pp=2\npipeline over pp { times = "tracce.json" }')
    (folder / "tiny.plan").write_text(text)
    status, out, _ = planc(capsys, "check", "tiny.plan", "--json")
    found = json.loads(out)["diagnostics"]
    assert status == 1 and [d["code"] for d in found] == ["E100", "E100", "E233", "E107"]
    assert found[2]["help"] == ["did you mean `trace.json`?"]


def test_fmt(capsys: Captured, folder: Path) -> None:
    assert planc(capsys, "fmt", "tiny.plan", "--check") == (0, "", "")
    assert planc(capsys, "fmt", "tiny.plan") == (0, "", "")
    ugly = PLAN.replace("batch = 8", "batch=8   # rows").replace("{ lr = 0.1 }", "{lr=0.1}")
    (folder / "tiny.plan").write_text(ugly)
    status, out, err = planc(capsys, "fmt", "tiny.plan", "--check")
    assert status == 1 and not out and "run: planc fmt tiny.plan" in err
    status, out, _ = planc(capsys, "fmt", "tiny.plan", "--stdout")
    assert status == 0 and "batch = 8  # rows" in out and (folder / "tiny.plan").read_text() == ugly
    assert planc(capsys, "fmt", "tiny.plan") == (0, "tiny.plan: formatted\n", "")
    assert (folder / "tiny.plan").read_text() == out
    assert planc(capsys, "fmt", "tiny.plan", "--check")[0] == 0


# -- compile, inspect -------------------------------------------------------------------------------------------------


def test_compile(capsys: Captured, folder: Path) -> None:
    status, out, err = planc(capsys, "compile", "tiny.plan")
    assert status == 0 and not err
    for line in (
        r"data over dp +applied +2 inputs cut dp=2, 8 gradients reduced in 1 bucket\b",
        r"microbatches = 2 +applied",
        r"optimizer sgd +applied +8 parameters",
        r"clip grad_norm = 1 +applied",
        r"tiny: 65 parameters, mesh dp=2, \d segments \(\d distinct\), \d+ instructions, compiled in [\d.]+ s",
        r"program: build/tiny",
    ):
        assert re.search(line, out), f"{line}\n{out}"
    assert (folder / "build/tiny/program.yaml").exists()


def test_compile_elsewhere_and_again(capsys: Captured, folder: Path) -> None:
    for mesh in ("dp=2", "dp=4"):
        status, out, _ = planc(capsys, "compile", "tiny.plan", "-o", "other/place", "--set", mesh, "--json")
        found = json.loads(out)
        assert status == 0 and found["folder"] == "other/place" and found["mesh"] == {"dp": int(mesh[-1])}
        assert {item["outcome"] for item in found["asked"]} == {"applied"}
        assert found["parameters"] == 65 and found["reduced_bytes"] == 4 * 65
    assert "dp: 4" in (folder / "other/place/program.yaml").read_text()


def test_compile_overwrites_nothing_but_programs(capsys: Captured, folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine/precious.txt").write_text("keep")
    status, _, err = planc(capsys, "compile", "tiny.plan", "-o", "mine")
    assert status == 1 and "mine exists and holds no program" in err
    assert [path.name for path in (folder / "mine").iterdir()] == ["precious.txt"]


def test_dump_after(capsys: Captured) -> None:
    status, out, _ = planc(capsys, "compile", "tiny.plan", "--dump-after", "lower_losses", "--dump-after", "lift_vary")
    assert status == 0
    assert re.findall(r"^# after (\w+)$", out, re.M) == ["lower_losses", "lift_vary"]
    every = re.findall(r"^# after (\w+)$", planc(capsys, "compile", "tiny.plan", "--dump-after", "all")[1], re.M)
    assert every[0] == "capture" and {"lower_losses", "lower_mean", "assign_layouts", "resolve_counts"} < set(every)


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("captured", "input %x : float32[8, 4]  # kind=batch"),
        ("layouts", "input %x : float32[8, 4] {dp: S(0), micro: S(0)}  # kind=batch"),
        ("segments", "# 2 calls: layers.1, layers.2"),
        ("local", "def backward(ctx, given)"),
        ("instructions", "reduce bucket0\nwait reduce bucket0\nclip\nstep bucket0\nreport\n"),
    ],
)
def test_inspect_each_level(capsys: Captured, level: str, shown: str) -> None:
    status, out, _ = planc(capsys, "inspect", "tiny.plan", "--level", level)
    assert status == 0 and shown in out
    status, text, _ = planc(capsys, "inspect", "tiny.plan", "--level", level, "--json")
    assert json.loads(text) == {"level": level, "text": out}


def test_inspect_knows_all_levels() -> None:
    from compiler.report.show import LEVELS

    assert LEVEL_NAMES == (*LEVELS, "schedule")


PIPELINE = """\
model "net.py:Net"
input x : float32[6, 4]
mesh pp=2
pipeline over pp { schedule = 1f1b, microbatches = 3 }
"""
DRAWN = """\
1f1b: 2 ranks, 3 micro-batches
rank 0  F0 F1 ······B0─── F2 B1─── ···B2───
rank 1  ···F0 B0─── F1 B1─── F2 B2─── ······
makespan 12, bubble 33.3 %, at most 2 activations alive on a rank
"""


def test_inspect_the_schedule(capsys: Captured, folder: Path) -> None:
    (folder / "pipe.plan").write_text(PIPELINE)
    status, out, err = planc(capsys, "inspect", "pipe.plan", "--level", "schedule", "--svg", "pipe.svg")
    assert (status, err) == (0, "")
    assert out == DRAWN
    assert "<title>backward of stage 1, micro-batch 2: 8 to 10</title>" in (folder / "pipe.svg").read_text()
    status, out, _ = planc(capsys, "inspect", "pipe.plan", "--level", "schedule", "--json")
    found = json.loads(out)
    assert status == 0 and found["makespan"] == 12 and found["alive"] == [2, 1] and "0F0,0F1,0B0" in found["text"]


def test_inspect_the_schedule_of_a_file(capsys: Captured, folder: Path) -> None:
    (folder / "pipe.plan").write_text(PIPELINE.replace("1f1b", '"own.csv"'))
    (folder / "own.csv").write_text("0F0,0B0,0F1,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B3\n")
    status, out, err = planc(capsys, "inspect", "pipe.plan", "--level", "schedule")
    assert status == 1 and not out and "error[E221]: there is no micro-batch 3" in err and "own.csv:2:21" in err


def test_inspect_the_schedule_that_costs_decide(capsys: Captured, folder: Path) -> None:
    (folder / "pipe.plan").write_text(PIPELINE.replace("1f1b", "auto").replace("[6, 4]", "[6, 4]\ninput y : float32[6]"))
    status, out, _ = planc(capsys, "inspect", "pipe.plan", "--level", "schedule")
    assert status == 0 and out.startswith("auto: 2 ranks, 3 micro-batches\n") and "µs, bubble" in out
    status, out, _ = planc(capsys, "inspect", "pipe.plan", "--level", "schedule", "--set", "pp=1")
    assert status == 0 and "rank 0  F0 B0─── F1 B1─── F2 B2───" in out


def test_check_reads_the_schedule(capsys: Captured, folder: Path) -> None:
    (folder / "pipe.plan").write_text(PIPELINE.replace("1f1b", '"own.csv"'))
    status, _, err = planc(capsys, "check", "pipe.plan")
    assert status == 1 and "error[E221]: there is no schedule file own.csv" in err


def test_no_schedule_without_a_pipeline(capsys: Captured) -> None:
    status, out, err = planc(capsys, "inspect", "tiny.plan", "--level", "schedule")
    assert status == 2 and not out and "has no `pipeline`" in err


def test_inspect_one_segment(capsys: Captured) -> None:
    status, out, _ = planc(capsys, "inspect", "tiny.plan", "--segment", "layers.1")
    assert status == 0 and out.count("graph ") == 1 and "# 2 calls: layers.1, layers.2" in out
    status, out, _ = planc(capsys, "inspect", "tiny.plan", "--segment", "layers.1", "--level", "local")
    assert status == 0 and out.count("def forward(") == 1
    status, out, err = planc(capsys, "inspect", "tiny.plan", "--segment", "layer.1")
    assert status == 2 and not out and "no segment 'layer.1'; there are: layers.0" in err


def test_estimate_draws_the_step(capsys: Captured, folder: Path) -> None:
    status, out, _ = planc(capsys, "estimate", "tiny.plan", "--svg", "step.svg")
    svg = (folder / "step.svg").read_text()
    assert status == 0 and "step on" in out
    assert "tiny: one step, estimated" in svg and "optimizer of bucket0" in svg


# -- simulate, verify -------------------------------------------------------------------------------------------------


def test_simulate(capsys: Captured) -> None:
    status, out, _ = planc(capsys, "simulate", "tiny.plan", "--steps", "2", "--set", "dp=4")
    assert status == 0
    assert re.match(r"step 1: loss [\d.]+  mean [\d.]+\nstep 2: loss [\d.]+  mean [\d.]+\n4 ranks simulated", out)
    status, out, _ = planc(capsys, "simulate", "tiny.plan", "--json")
    found = json.loads(out)
    assert status == 0 and found["ranks"] == 2 and len(found["losses"]) == 3


def test_a_forward_only_plan(capsys: Captured, folder: Path) -> None:
    """It has outputs to simulate, no loss, and nothing to run."""
    net = "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Linear(4, 3), nn.ReLU())\n"
    (folder / "net.py").write_text(net)
    (folder / "forward.plan").write_text(
        'model "net.py:net"\nbatch = 8\ninput input : float32[batch, 4]\nmesh dp=2\ndata over dp\nmode = forward\n'
    )
    status, out, _ = planc(capsys, "simulate", "forward.plan", "--steps", "1")
    assert status == 0 and out == "step 1: output [8, 3]\n2 ranks simulated in this process on random batches\n"
    status, out, _ = planc(capsys, "simulate", "forward.plan", "--steps", "1", "--json")
    assert status == 0 and json.loads(out) == {"ranks": 2, "outputs": [{"output": [8, 3]}]}
    status, out, err = planc(capsys, "run", "forward.plan")
    assert status == 1 and not out and "`session.forward(batch)`" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["simulate", "verify"])
def test_a_simulated_rank_that_fails(capsys: Captured, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Named with what it was doing; the traceback is that of the error itself."""

    def fail(self: Executor, instruction: Instruction) -> None:
        raise ValueError("no gradients today")

    monkeypatch.setattr(Executor, "do_clip", fail)
    status = main([command, "tiny.plan", "--steps", "1"])
    first, *rest = capsys.readouterr().err.splitlines()
    said = r"planc: rank [01] failed in 'clip \(step 1\)': ValueError: no gradients today"
    assert status == 1 and re.fullmatch(said, first)
    assert rest[0].startswith("Traceback") and rest[-1] == "ValueError: no gradients today"
    assert not any("InstructionError" in line or "RankFailure" in line for line in rest)


def test_verify(capsys: Captured) -> None:
    status, out, _ = planc(capsys, "verify", "tiny.plan", "--steps", "1")
    assert status == 0 and "tiny.plan: 2 ranks, 1 steps in float64: equal to one-device eager PyTorch" in out
    status, out, _ = planc(capsys, "verify", "tiny.plan", "--json", "--set", "batch=7", "--set", "data.microbatches=1")
    found = json.loads(out)
    assert status == 0 and found["ok"] is True and found["worst"][0]["error"] < 1e-10


def test_verify_of_a_model_without_a_finite_loss(capsys: Captured, folder: Path) -> None:
    """That is said of the model, not of the plan."""
    (folder / "net.py").write_text(NET.replace("F.mse_loss(", "(-1 - y.abs()).log().mean() + F.mse_loss("))
    status, out, _ = planc(capsys, "verify", "tiny.plan", "--steps", "1")
    assert status == 1 and "the model itself is not finite on one device, in the loss of step 1 (nan)" in out
    status, out, _ = planc(capsys, "verify", "tiny.plan", "--steps", "1", "--json")
    assert status == 1 and json.loads(out)["not_finite"] == "loss of step 1 (nan)"


def test_a_metric_that_mixes_micro_batches(capsys: Captured, folder: Path) -> None:
    """It is refused as the loss would be, but can be left out; what the loss needs cannot."""
    (folder / "net.py").write_text(NET.replace('"mean": x.mean()', '"ppl": x.mean().exp()'))
    status, _, err = planc(capsys, "compile", "tiny.plan")
    assert status == 1 and "error[E202]" in err and "it is for the metric ppl alone: leave that out" in err
    (folder / "net.py").write_text(NET.replace("F.mse_loss(", "x.mean().exp() + F.mse_loss("))
    status, _, err = planc(capsys, "compile", "tiny.plan")
    assert status == 1 and "error[E202]" in err and "metric" not in err


def test_verify_fails_with_status_1(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two floating-point programs agree to 1e-30."""
    monkeypatch.setattr("compiler.analysis.verify.TOLERANCE", 1e-30)
    status, out, _ = planc(capsys, "verify", "tiny.plan", "--steps", "1")
    assert status == 1 and "NOT equal to one-device eager PyTorch" in out and "relative error" in out
    status, out, _ = planc(capsys, "verify", "tiny.plan", "--steps", "1", "--json")
    assert status == 1 and json.loads(out)["ok"] is False


# -- run --------------------------------------------------------------------------------------------------------------


def test_run_and_resume(capsys: Captured, folder: Path) -> None:
    """In processes of their own, since rank 0 prints to the real standard output."""
    first = python("-m", "compiler.cli", "run", "tiny.plan")
    assert first.returncode == 0, first.stderr
    assert "step 4/4" in first.stdout and "planc run tiny.plan --resume" in first.stdout
    log = [json.loads(line) for line in (folder / "runs/tiny/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4]
    again = python("-m", "compiler.cli", "run", "tiny.plan")
    assert again.returncode == 1 and "--resume" in again.stderr and "Traceback" not in again.stderr
    more = python("-m", "compiler.cli", "run", "tiny.plan", "--resume", "--set", "train.steps=6", "--set", "dp=1")
    assert more.returncode == 0, more.stderr
    assert "going on from" in more.stdout and "step 6/6" in more.stdout
    log = [json.loads(line) for line in (folder / "runs/tiny/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5, 6]


def test_run_for_machines(folder: Path) -> None:
    """One JSON object per line: the records of the log, and the end; or what is wrong."""
    done = python("-m", "compiler.cli", "run", "tiny.plan", "--json", "--set", "train.steps=2")
    *steps, end = [json.loads(line) for line in done.stdout.splitlines()]
    log = folder / "runs/tiny/log.jsonl"
    assert done.returncode == 0 and steps == [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["step"] for record in steps] == [1, 2] and end["done"] == 2 and end["log"] == "runs/tiny/log.jsonl"
    again = python("-m", "compiler.cli", "run", "tiny.plan", "--json")
    assert again.returncode == 1 and "--resume" in json.loads(again.stdout)["error"] and not again.stderr
    (folder / "rows.py").write_text("import os\n\n\ndef data():\n    os._exit(3)\n")
    killed = python("-m", "compiler.cli", "run", "tiny.plan", "--json", "--set", 'train.data="rows:data"')
    assert killed.returncode == 3 and "ended with status 3" in json.loads(killed.stdout)["error"]


def test_torchrun(capsys: Captured, folder: Path) -> None:
    assert planc(capsys, "compile", "tiny.plan")[0] == 0
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    done = python(*launcher, "2", "-m", "runtime", "build/tiny")
    assert done.returncode == 0, done.stderr
    assert "step 4/4" in done.stdout
    wrong = python(*launcher, "3", "-m", "runtime", "build/tiny", "--resume")
    assert wrong.returncode != 0 and "tiny needs 2 ranks (dp=2), but 3 are running" in wrong.stderr
    ours = "".join(line for line in wrong.stderr.splitlines(True) if "runtime/" in line)
    assert not ours, "no traceback from here; torchrun prints one of its own"


def test_the_runtime_starts_its_own_processes(capsys: Captured) -> None:
    assert planc(capsys, "compile", "tiny.plan")[0] == 0
    done = python("-m", "runtime", "build/tiny")
    assert done.returncode == 0 and "step 4/4" in done.stdout, done.stderr
    wrong = python("-m", "runtime", "build/tiny", "--processes", "3")
    assert wrong.returncode == 2 and "compiled for 2 ranks (dp=2), not 3" in wrong.stderr
    none = python("-m", "runtime", "build")
    assert none.returncode == 1 and "holds no program.yaml" in none.stderr and "Traceback" not in none.stderr


def test_run_as_a_rank_of_torchrun_wants_a_program(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    status, _, err = planc(capsys, "run", "tiny.plan")
    assert status == 2 and "compile first: planc compile tiny.plan -o build/tiny" in err


# -- mistakes ---------------------------------------------------------------------------------------------------------

COMPILING = ("compile", "inspect", "simulate", "verify", "run")
EVERY = ("check", "fmt", *COMPILING)


@pytest.mark.parametrize("command", EVERY)
def test_a_missing_file(capsys: Captured, command: str) -> None:
    status, out, err = planc(capsys, command, "tini.plan")
    assert status == 1 and not out
    assert "error[E001]: cannot read 'tini.plan'" in err and "did you mean `tiny.plan`?" in err


@pytest.mark.parametrize("command", ("check", *COMPILING))
def test_a_bad_plan_with_all_its_errors(capsys: Captured, folder: Path, command: str) -> None:
    (folder / "bad.plan").write_text(PLAN.replace("lr = 0.1", "rate = 0.1").replace("mesh dp=2", "mesh dp=0"))
    status, out, err = planc(capsys, command, "bad.plan")
    assert status == 1 and not out and "2 errors" in err
    assert " --> bad.plan:7:" in err and " --> bad.plan:9:" in err
    if command not in ("run",):
        status, out, err = planc(capsys, command, "bad.plan", "--json")
        assert status == 1 and len(json.loads(out)["diagnostics"]) == 2 and not err


def test_fmt_of_what_is_no_plan(capsys: Captured, folder: Path) -> None:
    (folder / "bad.plan").write_text("model {{\n")
    status, _, err = planc(capsys, "fmt", "bad.plan")
    assert status == 1 and "error[" in err and (folder / "bad.plan").read_text() == "model {{\n"


@pytest.mark.parametrize("command", ("check", *COMPILING))
def test_a_bad_set(capsys: Captured, command: str) -> None:
    status, _, err = planc(capsys, command, "tiny.plan", "--set", "btch=4")
    assert status == 1 and "did you mean `batch`?" in err
    assert planc(capsys, command, "tiny.plan", "--set", "batch")[0] == 1
    assert planc(capsys, command, "tiny.plan", "--set", "batch=many")[0] == 1


STRATEGIES = {
    "zero": "zero over dp { stage = 1 }",
    "tensor": 'tensor over tp { column "head" }',
    "pipeline": "pipeline over pp { microbatches = 1 }",
    "context": "context over cp",
}
@pytest.mark.parametrize("word", STRATEGIES)
def test_a_strategy_over_one_rank_changes_nothing(capsys: Captured, folder: Path, word: str) -> None:
    text = PLAN.replace("mesh dp=2", "mesh dp=1 tp=1 pp=1 cp=1").replace(" { microbatches = 2 }", "")
    (folder / "one.plan").write_text(f"{text}{STRATEGIES[word]}\n")
    status, out, _ = planc(capsys, "compile", "one.plan", "--json")
    assert status == 0
    assert {a["outcome"] for a in json.loads(out)["asked"] if a["request"].startswith((word, "data"))} == {"no effect"}


def test_patterns_are_printed_as_they_stand(capsys: Captured, folder: Path) -> None:
    """Brackets are no markup."""
    text = PLAN.replace("mesh dp=2", "mesh dp=1 tp=2") + 'tensor over tp { row "laye[rs]s.*", style = manual }\n'
    (folder / "tensor.plan").write_text(text)
    status, out, err = planc(capsys, "compile", "tensor.plan")
    assert status == 0 and re.search(r'row "laye\[rs\]s\.\*" +applied', out), out + err


def test_an_axis_that_nothing_uses(capsys: Captured, folder: Path) -> None:
    (folder / "tiny.plan").write_text(PLAN.replace("mesh dp=2", "mesh dp=2 spare=2"))
    status, _, err = planc(capsys, "compile", "tiny.plan")
    assert status == 0 and "W002" in err and "spare" in err


@pytest.mark.parametrize(
    ("net", "message"),
    [
        ("import nowhere\n", "nowhere"),
        ("class Net: pass\n", "Net"),
        (NET.replace("def forward(self, x, y):", "def forward(self, x):"), "forward"),
        (NET.replace("layer(x).relu()", "layer(x) if x.sum() > 0 else x"), "net.py:13"),
        (NET.replace("for _ in range(layers)", "for _ in range(1 // 0)"), "net.py:8"),
    ],
    ids=["import", "module", "signature", "control flow", "factory"],
)
def test_a_bad_model(capsys: Captured, folder: Path, net: str, message: str) -> None:
    (folder / "net.py").write_text(net)
    status, _, err = planc(capsys, "compile", "tiny.plan")
    assert status == 1 and "error[" in err and message in err
    assert not (folder / "build").exists()


# -- the command itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [[], ["compile"], ["complie", "tiny.plan"], ["inspect", "tiny.plan", "--level", "locals"], ["fmt", "tiny.plan", "--set", "a=1"]],
)
def test_a_mistake_in_the_command_is_status_2(capsys: Captured, arguments: Sequence[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and "usage: planc" in capsys.readouterr().err


def test_help_names_every_command(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and all(f"    {name} " in out for name in EVERY)
    assert parser().prog == "planc"


def test_version(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkout its own; of an installed package what the installer noted."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"planc {wanted}\n"
    monkeypatch.setattr(version, "__file__", str(tmp_path / "compiler/version.py"))
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name}'s")
    assert version.version() == "planc's"


def test_the_package_is_the_command() -> None:
    done = python("-m", "compiler", "check", "tiny.plan")
    assert (done.returncode, done.stdout) == (0, "tiny.plan: ok (2 ranks: dp=2)\n"), done.stderr


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m compiler.cli inspect tiny.plan --level local | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr and done.stdout.count("\n") == 1
