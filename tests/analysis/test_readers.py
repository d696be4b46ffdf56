"""The memory and traffic readers against what the simulator's ranks do: every instruction, every byte."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from compiler.analysis.dry_run import dry_run
from compiler.analysis.memory import Memory, read_memory
from compiler.analysis.traffic import Traffic, read_traffic
from compiler.analysis.verify import random_batch
from compiler.driver import compile
from compiler.dsl import loads
from runtime.mesh import Mesh
from runtime.program import Program, load
from tests.analysis.plans import PLANS, plan_of
from tests.analysis.tracking import Observed, observe
from tests.zoo import get, plan_text


@pytest.mark.parametrize("name", PLANS)
def test_readers(name: str, tmp_path: Path):
    compilation = compile(plan_of(name))
    program = load(compilation.write(tmp_path / "program"))
    truth = observe(program, random_batch(program, 0))
    for stage in range(program.stages):
        run = dry_run(compilation, stage)
        check_memory(read_memory(run), truth[run.rank])
        assert counted(read_traffic(run)) == by_axes(program, truth[run.rank])


def check_memory(memory: Memory, truth: Observed) -> None:
    assert [(m.instruction, m.before, m.peak) for m in memory.moments] == truth.moments
    assert memory.peak.bytes == max(peak for _, _, peak in truth.moments)
    assert memory.peak.bytes == sum(memory.peak.categories.values())


def test_backward_frees_what_it_has_read(tmp_path: Path):
    """What was saved goes behind its last use, not at the end of the backward: what it makes finds room there."""
    compilation = compile(plan_of("accumulate"))
    program = load(compilation.write(tmp_path / "program"))
    saved = sum(value.nbytes for value in compilation.linked.kinds["layers"].code.saved)
    moments = observe(program, random_batch(program, 0))[0].moments
    risen = {peak - before for i, before, peak in moments if i.op == "backward" and i.target.startswith("layers.")}
    assert max(risen) < saved / 4  # 0.4 of it if all stayed


def counted(traffic: Traffic) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """(kind, axes) → calls and bytes."""
    calls: Counter = Counter()
    sent: Counter = Counter()
    for flow in traffic.flows:
        calls[flow.kind, flow.axes] += flow.calls
        sent[flow.kind, flow.axes] += flow.sent
    return {key: (calls[key], sent[key]) for key in calls}


def by_axes(program: Program, truth: Observed) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    mesh = Mesh(tuple(program.mesh.items()))
    found = {}
    for (kind, group), count in truth.counts.items():
        points = [mesh.coords(rank) for rank in group]
        axes = tuple(axis for axis in mesh.names if len({point[axis] for point in points}) > 1)
        found[kind, axes] = (count.calls, count.bytes)
    return found


@pytest.mark.parametrize("ranks", (2, 8))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_closed_forms(stage: int, ranks: int):
    """Of Ψ parameters a rank sends 2Ψ(N−1)/N elements. ZeRO 3 gathers a second time, for the backward, what is not
    needed right away: all layers but the last, so nearly 3Ψ(N−1)/N for a deep model."""
    zero = f"zero over dp {{ stage = {stage}, bucket = 1kB }}" if stage else ""
    compilation = compile(loads(plan_text(get("llama-tiny"), 8, f"dp={ranks}", extra=zero)))
    sizes = {p.name: math.prod(p.shape) for p in compilation.program.parameters if p.trained}
    again = sum(size for name, size in sizes.items() if name.startswith("layers.0.")) if stage == 3 else 0

    def sent(elements: int) -> int:
        assert elements % ranks == 0
        return elements * 4 * (ranks - 1) // ranks

    found = read_traffic(dry_run(compilation)).by_purpose()
    everything = sum(sizes.values())
    assert found["gradients"] == sent(everything if stage else 2 * everything)
    assert found.get("parameters", 0) == (sent(everything + again) if stage else 0)
