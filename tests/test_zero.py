"""ZeRO 1, 2 and 3: equal to one device, with the bytes and the memory that the paper promises."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from compiler.analysis.verify import random_batch, verify
from compiler.diagnostics import PlanError
from compiler.driver import compile
from compiler.dsl import loads
from runtime.program import load
from runtime.simulate import simulate
from tests.test_tensor import STYLES
from tests.zoo import get, plan_text

MODELS = ["gpt-tied-tiny", "llama-odd-tiny", "lora-tiny", "encdec-tiny", "mlp-tiny", "hf-qwen3"]
CASES = [
    *((name, stage, 2, 2) for name in MODELS for stage in (1, 2, 3)),
    *(("llama-tiny", stage, ranks, 1) for stage in (1, 2, 3) for ranks in (3, 4)),
]
"""The others are in tests/sweeps."""


def zero(stage: int, **options: object) -> str:
    """Buckets are small, so that even a tiny model has several."""
    given = {"stage": stage, "bucket": "2KB", **options}
    return f"zero over dp {{ {', '.join(f'{key} = {value}' for key, value in given.items())} }}"


def check(name: str, mesh: str, parts: int, extra: str, batch: int = 8) -> None:
    verdict = verify(loads(plan_text(get(name), batch=batch, mesh=mesh, microbatches=parts, extra=extra), "zero.plan"), steps=3)
    assert verdict.ok, verdict.deviations[0]


@pytest.mark.parametrize("name, stage, ranks, parts", CASES)
def test_equal_to_one_device(name: str, stage: int, ranks: int, parts: int) -> None:
    check(name, f"dp={ranks}", parts, zero(stage), batch=2 * ranks * parts)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3, "persist_below": 40},
        {"stage": 3, "prefetch": 0},
        {"stage": 3, "prefetch": 5, "gather": "step"},
        {"stage": 2, "accumulate": "local"},
        {"stage": 3, "bucket": "1MB"},
        {"stage": 1, "offload": "optimizer"},
        {"stage": 3, "offload": "params"},
        {"stage": 3, "offload": "all", "prefetch": 2},
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
def test_options(options: dict) -> None:
    stage = options.pop("stage")
    check("llama-tiny", "dp=2", 2, zero(stage, **options) + "\nclip grad_norm = 0.5")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid(stage: int) -> None:
    check("llama-tiny", "dp=4", 2, zero(stage, hybrid=2) + "\nclip grad_norm = 0.5")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_with_tensor_parallelism(stage: int) -> None:
    tensor = f"tensor over tp {{ {STYLES['llama-odd-tiny']}\n style = manual\n sequence = on }}"
    check("llama-odd-tiny", "dp=2 tp=2", 2, f"{zero(stage)}\n{tensor}\nclip grad_norm = 0.5")


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("stage, passes", [(1, 2), (2, 2), (3, 3)])
def test_bytes_are_the_papers(stage: int, passes: int, parts: int, tmp_path) -> None:
    """2Ψ for stages 1 and 2, 3Ψ for stage 3, each times (N-1)/N, a rank and step (Rajbhandari et al. 2020, section 7). With
    micro-batches, stage 3 gathers and scatters for each."""
    ranks = 2
    extra = zero(stage, accumulate="local") if stage == 2 else zero(stage)
    text = plan_text(get("llama-tiny"), batch=8, mesh=f"dp={ranks}", microbatches=parts, extra=extra)
    program = load(compile(loads(text, "zero.plan")).write(tmp_path / "program"))
    elements = sum(math.prod(p.shape) for p in program.parameters if p.trained)
    batch = random_batch(program, 0)

    def body(session):
        session.transport.counters.reset()
        session.step(batch)
        counts = session.transport.counters.by_group()
        return sum(c.bytes for (kind, _), c in counts.items() if kind in ("all_gather", "reduce_scatter"))

    (sent, other) = simulate(program, body)
    rounds = parts if stage == 3 else 1
    gathered = Counter(i.target for i in program.streams[0] if i.op == "gather")
    # What the last forward used is still there for the first backward, and what that used for the next forward.
    spared = sum(b.numel * ((passes - 1) * rounds - gathered[b.name]) for b in program.buckets)
    assert spared < elements * rounds
    assert sent == other == (passes * rounds * elements - spared) * 4 * (ranks - 1) // ranks


def test_frozen_parameters_are_cut_too() -> None:
    text = plan_text(get("lora-tiny"), batch=8, mesh="dp=2", microbatches=1, extra=zero(3))
    program = compile(loads(text, "zero.plan")).program
    frozen = [bucket for bucket in program.buckets if not bucket.trained]
    assert frozen and all(bucket.shard == ("dp",) and bucket.zero == 3 for bucket in frozen)
    held = {name for bucket in program.buckets for name in bucket.parameters}
    assert held == {p.name for p in program.parameters}


def test_an_optimizer_steps_as_soon_as_it_can() -> None:
    """Without clipping a bucket is stepped in the middle of the backward, with it behind the norm of all."""
    text = plan_text(get("llama-tiny"), batch=8, mesh="dp=2", microbatches=1, extra=zero(3))
    ops = [i.op for i in compile(loads(text, "zero.plan")).program.streams[0]]
    assert ops.index("step") < max(k for k, op in enumerate(ops) if op == "backward")
    text = plan_text(get("llama-tiny"), batch=8, mesh="dp=2", microbatches=1, extra=zero(3) + "\nclip grad_norm = 1.0")
    ops = [i.op for i in compile(loads(text, "zero.plan")).program.streams[0]]
    assert max(k for k, op in enumerate(ops) if op == "backward") < ops.index("clip") < ops.index("step")


def test_prefetch_is_the_order_of_gathers() -> None:
    text = plan_text(get("llama-tiny"), batch=8, mesh="dp=2", microbatches=1, extra=zero(3, prefetch=2))
    stream = compile(loads(text, "zero.plan")).program.streams[0]
    ahead = waiting = 0
    for instruction in stream:
        waiting += (instruction.op == "gather") - (instruction.op == "wait" and instruction.targets[0] == "gather")
        ahead = max(ahead, waiting)
    assert ahead == 3


def test_one_mesh_saves_and_another_goes_on(tmp_path) -> None:
    """From ZeRO 3 over 3 ranks to plain data parallelism over 2, and to ZeRO 1 over 2 stages of a pipeline."""
    entry = get("llama-odd-tiny")
    plans = {
        "three": plan_text(entry, batch=12, mesh="dp=3", microbatches=1, extra=zero(3)),
        "two": plan_text(entry, batch=12, mesh="dp=2", microbatches=1),
        "pipe": plan_text(
            entry, batch=12, mesh="pp=2 dp=2", microbatches=1,
            extra=zero(1) + "\npipeline over pp { schedule = 1f1b, microbatches = 2 }",
        ),
    }  # fmt: skip
    programs = {
        name: load(compile(loads(text, f"{name}.plan")).write(tmp_path / name)) for name, text in plans.items()
    }
    batches = [random_batch(programs["two"], seed) for seed in range(3)]

    def begin(session):
        session.step(batches[0])
        session.save(tmp_path / "saved")
        return [session.step(batch).loss for batch in batches[1:]]

    def go_on(session):
        session.restore(tmp_path / "saved")
        return [session.step(batch).loss for batch in batches[1:]]

    wanted = simulate(programs["three"], begin)[0]
    for name in ("two", "pipe"):
        for losses in simulate(programs[name], go_on):
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=0)


def test_offload_of_parameters_needs_stage_3() -> None:
    with pytest.raises(PlanError, match="stage = 3"):
        loads(plan_text(get("llama-tiny"), batch=8, mesh="dp=2", microbatches=1, extra=zero(1, offload="all")), "z.plan")
