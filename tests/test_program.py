"""Compiled programs: they run without the compiler, the same everywhere, and on any device."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiler.analysis.verify import random_batch
from compiler.driver import Options, compile
from compiler.dsl import loads
from runtime.instructions import format_stream, parse_stream
from runtime.program import ProgramError, load
from runtime.session import Session
from runtime.simulate import simulate
from runtime.transport import LocalTransport
from tests.zoo import get, plan_text

WORKER = """
import json, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "compiler":
            raise ImportError("the compiler is not here")
sys.meta_path.insert(0, Block())
import torch, runtime
session = runtime.load(sys.argv[1])
batches = torch.load(sys.argv[2])
losses = [session.step(batch).loss for batch in batches]
if session.transport.rank == 0:
    print(json.dumps(losses))
session.close()
"""


def build(folder: Path, name: str = "llama-tiny", wide: bool = True, **plan: object) -> Path:
    text = plan_text(get(name), **plan)  # type: ignore[arg-type]
    return compile(loads(text, f"{name}.plan"), options=Options(widen=wide)).write(folder / name)


@pytest.mark.parametrize(("name", "ranks"), [("llama-tiny", 1), ("gpt-tiny", 2)])
def test_processes_and_simulator_agree_and_need_no_compiler(build_dir: Path, name: str, ranks: int) -> None:
    folder = build(build_dir, name, mesh=f"dp={ranks}", microbatches=2, extra="clip grad_norm = 1.0")
    program = load(folder)
    batches = [random_batch(program, k) for k in range(3)]
    torch.save(batches, build_dir / "batches.pt")
    (build_dir / "worker.py").write_text(WORKER)
    simulated = simulate(program, lambda session: [session.step(batch).loss for batch in batches])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command += [str(build_dir / "worker.py"), str(folder), str(build_dir / "batches.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent.parent,
                          env={**__import__("os").environ, "PYTHONPATH": "."})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1]) == pytest.approx(simulated[0], rel=1e-12)
    assert all(losses == pytest.approx(simulated[0], rel=1e-15) for losses in simulated)


def test_64_ranks_in_one_process(build_dir: Path) -> None:
    program = load(build(build_dir, batch=64, mesh="dp=64"))
    batch = random_batch(program, 0)
    losses = simulate(program, lambda session: session.step(batch).loss)
    assert len(losses) == 64 and len(set(losses)) == 1


def test_no_device_in_the_program(build_dir: Path) -> None:
    """A program compiled here runs on any device: nothing in it names one."""
    for name in ("gpt-tiny", "encdec-tiny", "vit-tiny"):
        for file in build(build_dir, name, mesh="dp=2").rglob("*"):
            if file.suffix in (".py", ".txt", ".yaml"):
                assert not re.search(r"\bcuda\b|\bcpu\b|device\(", file.read_text()), file


def test_streams_print_and_parse(build_dir: Path) -> None:
    program = load(build(build_dir, mesh="dp=2", microbatches=2))
    text = format_stream(program.streams[0])
    assert format_stream(parse_stream(text)) == text


def test_a_reduction_starts_right_behind_its_last_gradient(build_dir: Path) -> None:
    text = plan_text(get("llama-tiny"), mesh="dp=2", microbatches=2).replace("microbatches = 2", "microbatches = 2, bucket = 1kB")
    compilation = compile(loads(text, "x.plan"))
    lines = [str(item) for item in compilation.program.streams[0] if item.op != "drop"]
    reduces = [k for k, line in enumerate(lines) if line.startswith("reduce")]
    assert len(reduces) > 3
    last = max(k for k, line in enumerate(lines) if line.startswith("backward"))
    assert min(reduces) < last, "the first reduction waits for the whole backward"
    assert all("@0" not in lines[k - 1] for k in reduces), "a reduction before the last micro-batch"


def test_broken_folders_are_explained(build_dir: Path) -> None:
    with pytest.raises(ProgramError, match="planc compile"):
        load(build_dir)
    folder = build(build_dir)
    (folder / "program.yaml").write_text("version: 99\n")
    with pytest.raises(ProgramError, match="version 99"):
        load(folder)
    (folder / "program.yaml").write_text("version: 1\nname: [")
    with pytest.raises(ProgramError, match="damaged"):
        load(folder)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "encdec-tiny", "vit-tiny", "resnet-tiny", "c43_inplace"])
def test_everything_is_made_on_the_rank_s_own_device(build_dir: Path, name: str) -> None:
    """A step on a device that is not the one where it was compiled: a tensor made elsewhere would not mix with its."""
    program = load(build(build_dir, name, wide=False, batch=7, mesh="dp=1", microbatches=1, optimizer=""))
    session = Session(program, LocalTransport(torch.device("meta")))
    session.executor.actions["report"] = lambda instruction: None
    batch = {name: tensor.to("meta") for name, tensor in random_batch(program, 0).items()}
    with pytest.raises(AssertionError):  # nothing is reported, for there are no values
        session.step(batch)
    made = [*(s.gradient for s in session.state.stores.values()), *session.executor.reported.values()]
    assert made and all(tensor.device.type == "meta" for tensor in made)
