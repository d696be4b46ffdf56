"""The memory of model states under ZeRO: what the paper promises, what a rank holds, and what the readers say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from compiler.analysis.dry_run import dry_run
from compiler.analysis.memory import Memory, read_memory
from compiler.analysis.verify import random_batch
from compiler.driver import Compilation, compile
from compiler.dsl import loads
from runtime.program import load
from tests.analysis.tracking import observe

PLAN = """
model "dsl_examples.models.llama:Llama" {{ layers = 2, dim = 128, heads = 4, kv_heads = 2, vocab = 512, context = 16 }}
batch = 8
seq = 16
input tokens : int64[batch, seq]
input labels : int64[batch, seq]
{cluster}
mesh dp={ranks}
data over dp
zero over dp {{ stage = {stage}, bucket = 200kB, offload = {offload} }}
precision {{ compute = bf16, reduce = bf16, master = fp32 }}
optimizer adamw {{ lr = 1e-3 }}
"""


def compiled(stage: int, ranks: int, offload: str = "none", device: str = "") -> Compilation:
    cluster = f"cluster {{ devices = {ranks}, device = {device} }}" if device else ""
    return compile(loads(PLAN.format(stage=stage, ranks=ranks, offload=offload, cluster=cluster), "states.plan"))


def elements(compilation: Compilation) -> int:
    """Ψ."""
    return sum(math.prod(parameter.shape) for parameter in compilation.program.parameters)


def memory(compilation: Compilation) -> Memory:
    return read_memory(dry_run(compilation))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage, everywhere, cut", [(1, 4, 12), (2, 2, 14), (3, 0, 16)])
def test_model_states(stage: int, everywhere: int, cut: int, ranks: int, tmp_path: Path) -> None:
    """Of mixed-precision Adam, between steps: 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N bytes (Rajbhandari et al. 2020, section 5)."""
    compilation = compiled(stage, ranks)
    promised = elements(compilation) * (everywhere + cut / ranks)
    resting = memory(compilation).resting
    assert sum(resting[name] for name in ("parameters", "gradients", "optimizer")) == pytest.approx(promised, rel=0.03)
    program = load(compilation.write(tmp_path / "program"))
    for rank in observe(program, random_batch(program, 0)):
        _, held, _ = rank.moments[0]
        assert held == pytest.approx(promised, rel=0.03)


@pytest.mark.parametrize("stage, offload, here, there", [(1, "optimizer", 4, 8), (3, "params", 7, 1), (3, "all", 1, 8)])
def test_the_hosts_memory_is_not_the_devices(stage: int, offload: str, here: int, there: int) -> None:
    """Between steps, of Ψ parameters on two ranks: what is offloaded is on the host, with the bf16 gradients and
    parameters that the host steps; the device keeps what it gathers into and reduces."""
    on_cpu, on_gpu = memory(compiled(stage, 2, offload)), memory(compilation := compiled(stage, 2, offload, "h100"))
    states = sum(on_gpu.resting[name] for name in ("parameters", "gradients", "optimizer") if name in on_gpu.resting)
    assert states == pytest.approx(here * elements(compilation), rel=0.03)
    assert on_gpu.host == pytest.approx(there * elements(compilation), rel=0.03)
    assert "host" not in on_gpu.resting and "host" not in on_gpu.peak.categories
    assert on_cpu.host == 0 and on_cpu.resting["host"] == on_gpu.host
