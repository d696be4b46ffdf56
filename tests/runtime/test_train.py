"""The training loop: data, log, messages, stopping and going on, on one rank, simulated ranks and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from runtime.__main__ import main
from runtime.checkpoint import checkpoints, export_safetensors, latest, read_state
from runtime.data import Sampler
from runtime.log import read_log
from runtime.session import Session
from runtime.train import total_steps, train
from runtime.transport import LocalTransport, RankFailure, run_ranks
from tests.runtime.handmade import IN, OUT, write_bigram, write_program

REPOSITORY = Path(__file__).parents[2]
SAMPLES = 50


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Runs write into the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def text() -> str:
    Path("text").mkdir()
    Path("text/a.py").write_text("def f(x):\n    return x + 1\n\n\n" * 37)
    return "text:text"


def losses(directory: str) -> list[float]:
    records = read_log(Path(directory) / "log.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def alone(folder: str, **options) -> int:
    return train(folder, transport=LocalTransport(), **options)


def simulated(ranks: int, folder: str, **options) -> int:
    (status,) = set(run_ranks(ranks, lambda transport: train(folder, transport=transport, **options)))
    return status


class Numbered:
    """Samples that carry their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((IN,), float(index)).double() / SAMPLES, "target": torch.ones(OUT).double()}


def numbered() -> Numbered:
    return Numbered()


def stop_after(monkeypatch, steps: int, number: int = signal.SIGINT) -> None:
    """Send this process a signal while it takes its `steps`-th step."""
    step = Session.step

    def interrupted(self: Session, *arguments, **options):
        if self.steps == steps - 1:
            os.kill(os.getpid(), number)
        return step(self, *arguments, **options)

    monkeypatch.setattr(Session, "step", interrupted)


# -- whole runs --------------------------------------------------------------------------------------------------------


def test_synthetic(capsys):
    write_program(Path("build/p"), steps=40)
    assert alone("build/p") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("step 1/40  loss ") and "samples/s" in out[0] and "norm" in out[0]
    assert any(line.startswith("step 40/40") for line in out)
    assert "log         runs/handmade/log.jsonl" in out
    assert "checkpoint  none: nothing is saved without train { save_every = … }" in out
    assert "Try next:" not in out  # the plan is not known
    first = read_log("runs/handmade/log.jsonl")[0]
    assert first.keys() == {
        "step", "epoch", "loss", "metrics", "lr", "grad_norm", "grad_norms", "seconds", "samples_per_s", "memory",
    }  # fmt: skip
    assert first["lr"] == 0.025 and first["memory"] > 2**20 and first["seconds"] > 0
    assert sum(losses("runs/handmade")[-5:]) < 0.7 * sum(losses("runs/handmade")[:5])
    assert not checkpoints("runs/handmade")


def test_text(text, capsys):
    """Learns more than byte frequencies, and says so; an epoch has a short batch at its end, over three ranks too."""
    for dp in (1, 3):
        write_bigram(Path(f"build/{dp}"), dp, data=text, steps=None, epochs=5, directory=f"runs/{dp}")
    assert alone("build/1", plan="my.plan") == 0
    out = capsys.readouterr().out
    assert "tokens/s" in out
    assert "nats/byte (mean of the last 4 steps); byte frequencies alone reach 2.41, the unigram entropy" in out
    assert "planc run my.plan" in out
    assert simulated(3, "build/3") == 0
    one, three = losses("runs/1"), losses("runs/3")
    assert len(one) == 5 * 9 and one[-1] < 1.5 < 5 < one[0]
    assert three == pytest.approx(one, rel=1e-12)
    assert [record["epoch"] for record in read_log("runs/1/log.jsonl")][8:10] == [0, 1]


def test_simulated_ranks_agree():
    for mesh in ((1, 1), (4, 1), (2, 2)):
        write_program(Path("build/p"), *mesh, directory="runs/" + "".join(map(str, mesh)))
        assert simulated(mesh[0] * mesh[1], "build/p") == 0
    assert losses("runs/41") == pytest.approx(losses("runs/11"), rel=1e-12)
    assert losses("runs/22") == pytest.approx(losses("runs/11"), rel=1e-12)


def test_weights_to_begin_with():
    write_program(Path("build/p"), steps=6, save_every=6)
    assert alone("build/p") == 0
    export_safetensors("runs/handmade/step-6", "w.safetensors")
    write_program(Path("build/q"), directory="runs/q")
    assert alone("build/q", weights="w.safetensors") == 0
    assert losses("runs/q")[0] < losses("runs/handmade")[0]


@pytest.mark.parametrize(
    ("options", "done", "position", "total"),
    [
        ({"steps": 7, "epochs": None}, 3, 30, 7),
        ({"steps": None, "epochs": None}, 0, 0, 4),
        ({"steps": None, "epochs": 3}, 0, 0, 12),
        ({"steps": 5, "epochs": 3}, 0, 0, 5),
        ({"steps": 99, "epochs": 3}, 0, 0, 12),
        ({"steps": None, "epochs": 3}, 8, 20, 8 + 2 + 4 + 4),  # with another batch size before
    ],
)
def test_total_steps(options, done, position, total):
    sampler = Sampler(35, 10)
    sampler.load_state({"epoch": 0, "position": position})
    assert total_steps(options, sampler, done) == total


# -- stopping and going on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_and_resumed_is_as_if_never_stopped(monkeypatch, capsys, number):
    write_program(Path("build/p"), steps=12, save_every=5)
    write_program(Path("build/q"), steps=12, save_every=5, directory="runs/whole")
    assert alone("build/q") == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 7, number)
        assert alone("build/p") == 128 + number
    name = signal.Signals(number).name
    assert f"stopped by {name} after step 7; --resume goes on from runs/handmade/step-7" in capsys.readouterr().out
    assert list(checkpoints("runs/handmade")) == [7, 5]
    assert alone("build/p", resume=True) == 0
    assert "going on from runs/handmade/step-7" in capsys.readouterr().out
    assert losses("runs/handmade") == losses("runs/whole")
    assert list(checkpoints("runs/handmade")) == [12, 10]
    assert alone("build/p", resume=True) == 0
    assert "nothing left to do: 12 of 12 steps are done" in capsys.readouterr().out


def test_stopped_without_checkpoints_says_so(monkeypatch, capsys):
    write_program(Path("build/p"), steps=12)
    stop_after(monkeypatch, 3, signal.SIGINT)
    assert alone("build/p") == 130
    said = "stopped by SIGINT after step 3; nothing is saved without train { save_every = … }"
    assert said in capsys.readouterr().out


def test_resumed_on_other_ranks():
    """dp = 4, then dp = 2, then tp = 3: the losses of one device."""
    write_program(Path("build/p"), steps=9, directory="runs/whole")
    assert alone("build/p") == 0
    for mesh, steps in (((4, 1), 3), ((2, 1), 6), ((1, 3), 9)):
        write_program(Path("build/p"), *mesh, total=9, steps=steps, save_every=3)
        assert simulated(mesh[0] * mesh[1], "build/p", resume=True) == 0
    assert losses("runs/handmade") == pytest.approx(losses("runs/whole"), rel=1e-12)


def test_exactly_once(monkeypatch):
    """Over a stop, a resumption with another number of ranks, and prefetching: each sample once an epoch."""
    seen: Counter[int] = Counter()
    step = Session.step

    def watched(self: Session, tensors, rows, local):
        first, _ = self.row_range()
        numbers = (tensors["x"][:, 0] * SAMPLES).round().int().tolist()
        seen.update(number for row, number in enumerate(numbers) if first + row < rows)
        return step(self, tensors, rows, local)

    monkeypatch.setattr(Session, "step", watched)
    data = "tests.runtime.test_train:numbered"
    plan = dict(rows=10, data=data, steps=None, save_every=1, directory="runs/x")
    write_program(Path("build/p"), epochs=2, **plan)
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        assert alone("build/p") == 130
    write_program(Path("build/p"), 2, epochs=2, **plan)
    assert simulated(2, "build/p", resume=True) == 0
    assert seen == Counter(dict.fromkeys(range(SAMPLES), 2))


def test_resume_without_a_checkpoint(capsys):
    write_program(Path("build/p"), steps=2)
    assert alone("build/p", resume=True) == 0
    assert "no checkpoint in runs/handmade: starting from the beginning" in capsys.readouterr().out


def test_resume_passes_over_a_broken_one(capsys):
    write_program(Path("build/p"), steps=4, save_every=2)
    assert alone("build/p") == 0
    Path("runs/handmade/step-4/.metadata").unlink()
    assert alone("build/p", resume=True) == 0
    out = capsys.readouterr().out
    assert "passing over a checkpoint: runs/handmade/step-4 is no complete checkpoint" in out
    assert "going on from runs/handmade/step-2" in out
    assert read_state(latest("runs/handmade")).step == 4


def test_checkpoints_of_another_run_are_safe(capsys):
    write_program(Path("build/p"), steps=4, save_every=2)
    assert alone("build/p") == 0
    assert alone("build/p") == 1
    message = "planc: runs/handmade/step-4 is left from another run: go on with --resume, or delete runs/handmade first"
    assert message in capsys.readouterr().err
    assert len(losses("runs/handmade")) == 4


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_loss_is_not_finite(capsys):
    write_bigram(Path("build/p"), steps=50, save_every=1)
    program = Path("build/p/program.yaml")
    program.write_text(program.read_text().replace("lr: 10.0", "lr: 1.0e+308"))
    assert simulated(1, "build/p") == 1
    out = capsys.readouterr().out
    assert "the loss is nan" in out or "the loss is inf" in out
    assert "the loss was not finite" in out and "for 3 steps in a row. Try a smaller learning rate" in out
    finite = [step for step, loss in enumerate(losses("runs/bigram"), 1) if not isinstance(loss, str)]
    assert next(iter(checkpoints("runs/bigram"))) == finite[-1], "no later state was worth saving"


@pytest.mark.parametrize("ranks", [1, 3])
def test_missing_data(capsys, ranks):
    write_bigram(Path("build/p"), ranks, data="text:nowhere")
    assert simulated(ranks, "build/p") == 1
    assert capsys.readouterr().err == "planc: there is no folder nowhere\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rows=2000, data="tests.runtime.test_train:numbered"), "50 samples never fill a batch of 2000"),
        (dict(data="tests.runtime.test_train:nothing"), "has no `nothing`"),
        (dict(data="nowhere:nothing"), "there is no module `nowhere`"),
    ],
)
def test_wrong_data(capsys, change, message):
    write_program(Path("build/p"), **change)
    assert alone("build/p") == 1
    assert message in capsys.readouterr().err


DATA = """\
def check(index):
    if index == {bad}:
        raise ValueError("no such row\\nat all")


class Rows:
    def __len__(self):
        return {length}

    def __getitem__(self, index):
        check(index)
        import torch
        from tests.runtime.handmade import IN, OUT
        return {{"x": torch.zeros(IN, dtype=torch.float64), "target": torch.zeros(OUT, dtype=torch.float64)}}


def rows():
    return Rows()
"""


@pytest.mark.parametrize(
    ("length", "bad", "message"),
    [
        ("50", "0", 'planc: the data set of train {{ data = "{file}:rows" }} failed: ValueError: no such row ({file}:3)'),
        ("1 // 0", "0", 'planc: the data set of train {{ data = "{file}:rows" }} failed: ZeroDivisionError: {why} ({file}:8)'),
        ("50", "9", "the data set failed at sample 9 of 50: ValueError: no such row ({file}:3)"),
    ],
)
def test_a_data_set_that_fails(capsys, length: str, bad: str, message: str) -> None:
    """In one line, with the place in the user's file, and nothing of ours."""
    file = Path("rows.py").resolve()
    file.write_text(DATA.format(length=length, bad=bad))
    write_program(Path("build/p"), data=f"{file}:rows")
    assert alone("build/p") == 1
    err = capsys.readouterr().err
    assert err.rstrip().endswith(message.format(file=file, why="integer division or modulo by zero"))
    assert err.count("\n") == 1 and "Traceback" not in err


def test_no_program(capsys):
    assert alone("nowhere") == 1
    assert "planc: nowhere holds no program.yaml" in capsys.readouterr().err


def test_wrong_number_of_ranks(capsys):
    write_program(Path("build/p"), 2)
    assert alone("build/p") == 1
    assert "handmade needs 2 ranks (dp=2 tp=1), but 1 are running" in capsys.readouterr().err
    assert main(["build/p", "--processes", "3"]) == 2
    assert "was compiled for 2 ranks (dp=2 tp=1), not 3" in capsys.readouterr().err


def test_wrong_weights(capsys):
    write_program(Path("build/p"))
    assert alone("build/p", weights="nowhere.safetensors") == 1
    assert "nowhere.safetensors cannot be read as safetensors" in capsys.readouterr().err


def test_a_failing_rank_ends_all(monkeypatch, capsys):
    step = Session.step

    def failing(self: Session, *arguments, **options):
        if self.transport.rank == 2 and self.steps == 1:
            raise ValueError("an injected error")
        return step(self, *arguments, **options)

    monkeypatch.setattr(Session, "step", failing)
    write_program(Path("build/p"), 3)
    with pytest.raises(RankFailure, match="rank 2 failed.*an injected error"):
        simulated(3, "build/p")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "planc: rank 2 failed in 'load the batch of step 2': ValueError: an injected error"
    followed = sorted(line for line in rest if line.startswith("planc: "))
    assert [line.startswith(f"planc: rank {k} stopped at ") for k, line in enumerate(followed)] == [True, True]
    assert all("rank 2 failed in 'load the batch of step 2': " in line for line in followed)
    assert rest.count("Traceback (most recent call last):") == 1


# -- processes ---------------------------------------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen[str]:
    """python -m runtime …, without the compiler."""
    code = (
        "import runpy, sys; sys.modules['compiler'] = None; "
        "sys.argv = ['runtime', *sys.argv[1:]]; runpy.run_module('runtime', run_name='__main__')"
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=env, text=True, stdout=pipe, stderr=pipe)


def test_two_processes(text):
    """Interrupted in the middle and resumed: the losses of simulated ranks."""
    options = dict(data=text, steps=400, save_every=100)
    write_bigram(Path("build/p"), 2, **options)
    write_bigram(Path("build/q"), 2, **options, directory="runs/simulated")
    with start("build/p") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 20/"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130, err
    assert "stopped by SIGINT after step" in out, err
    done = read_state(latest("runs/bigram")).step
    assert 20 <= done < 400
    with start("build/p", "--resume", "--plan", "my.plan") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert f"going on from runs/bigram/step-{done}" in out and "planc verify my.plan --set dp=4" in out
    assert simulated(2, "build/q") == 0
    assert losses("runs/bigram") == pytest.approx(losses("runs/simulated"), rel=1e-12)


def test_a_failing_process_is_reported():
    """The launcher names the rank, and no process is left."""
    write_bigram(Path("build/p"), 2, steps=5)
    code = Path("build/p/segments/net.py")
    broken = "assert ctx.coords['dp'] == 0, 'broken'\n    def real(x):"
    code.write_text(code.read_text().replace("def real(x):", broken))
    with start("build/p") as process:
        _, err = process.communicate()
    assert process.returncode == 1
    first, *rest, last = err.splitlines()
    assert first == last == "planc: rank 1 failed in 'forward net @0 (step 1)': AssertionError: broken"
    (followed,) = (line for line in rest if not line.startswith("[rank 1] "))
    assert followed.startswith("planc: rank 0 stopped at ") and followed.endswith(first.removeprefix("planc: "))
    assert rest.count("[rank 1] Traceback (most recent call last):") == 1 and "segments/net.py" in err


def test_a_killed_process_is_reported():
    write_bigram(Path("build/p"), 2, steps=100_000)
    with start("build/p") as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step 10/"))
        os.kill(rank_of(process, 1), signal.SIGKILL)
        _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGKILL
    first, followed, last = err.splitlines()
    assert first == last == "planc: rank 1 failed: it was killed (SIGKILL, as by the system for want of memory)"
    assert followed.startswith("planc: rank 0 stopped at ")


def rank_of(launcher: subprocess.Popen[str], rank: int) -> int:
    """The process of a rank."""
    psutil = pytest.importorskip("psutil")
    children = psutil.Process(launcher.pid).children()
    return next(child.pid for child in children if child.environ().get("RANK") == str(rank))


def test_ctrl_c_before_the_first_step():
    """While the ranks still import and build: one line, at once."""
    write_bigram(Path("build/p"), 2, steps=5)
    with start("build/p") as process:
        wait_for_ranks(process, 2)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, err = process.communicate()
    assert process.returncode == 130 and err == "planc: interrupted\n"
    assert time.monotonic() - began < 15


def wait_for_ranks(launcher: subprocess.Popen[str], count: int) -> None:
    psutil = pytest.importorskip("psutil")
    end = time.monotonic() + 60
    while len(psutil.Process(launcher.pid).children()) < count and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(1)  # the interpreters have begun with the module
