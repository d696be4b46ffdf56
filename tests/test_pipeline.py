"""Pipelines: equal to one device with every schedule, alone and with data, ZeRO and tensor parallelism."""

from __future__ import annotations

import pytest

from compiler.analysis.verify import verify
from compiler.driver import compile
from compiler.dsl import loads
from tests.test_tensor import STYLES
from tests.zoo import get, plan_text

full = pytest.mark.full
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "auto")
DEEP = "llama-small"  # four layers: enough for two stages on each of two or three ranks
MODELS = [
    "gpt-tied-tiny", "lora-tiny", "encdec-tiny", "mlp-tiny", "vit-tiny", "c01_tied_pp", "c04_mask_boundary",
    "c06_frozen_front", "c08_uneven_tokens", "c09_encdec", "c12_dropout", "c33_doc_mask", "c36_label_shift",
    "c43_inplace", "hf-llama", "hf-gpt2", "hf-qwen3",
]  # fmt: skip


def pipeline(schedule: str = "1f1b", parts: int = 4, **options: object) -> str:
    given = {"schedule": schedule, "microbatches": parts, **options}
    return f"pipeline over pp {{ {', '.join(f'{key} = {value}' for key, value in given.items())} }}"


def check(name: str, mesh: str, extra: str, batch: int = 8) -> None:
    verdict = verify(loads(plan_text(get(name), batch=batch, mesh=mesh, microbatches=1, extra=extra), "pipe.plan"), steps=3)
    assert verdict.ok, verdict.deviations[0]


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """Encoder and decoder, tied weights on two stages, values that skip over stages, frozen fronts, dropout, masks."""
    check(name, "pp=2", pipeline(parts=2))


@pytest.mark.parametrize(
    "schedule, ranks, parts",
    [
        *((schedule, 2, 4) for schedule in SCHEDULES),
        ("gpipe", 3, 5), ("1f1b", 4, 5), ("zb_h1", 3, 8), ("1f1b", 3, 1), ("zb_h1", 2, 1),
    ],
)  # fmt: skip
def test_schedules(schedule: str, ranks: int, parts: int) -> None:
    check(DEEP, f"pp={ranks}", pipeline(schedule, parts), batch=2 * parts)


@pytest.mark.parametrize("name", ["encdec-tiny", "c04_mask_boundary"])
def test_values_that_skip_stages(name: str) -> None:
    check(name, "pp=3", pipeline(parts=3), batch=6)


@pytest.mark.parametrize("batch", [7, 9])
def test_a_batch_that_does_not_divide(batch: int) -> None:
    check("llama-tiny", "pp=2", pipeline(parts=4), batch=batch)


@pytest.mark.parametrize("stage, schedule", [(1, "1f1b"), (3, "1f1b"), (2, "zb_h1"), (3, "zb_v"), (3, "interleaved")])
def test_with_zero(stage: int, schedule: str) -> None:
    zero = f"zero over dp {{ stage = {stage}, bucket = 4KB }}\nclip grad_norm = 0.5"
    check(DEEP, "pp=2 dp=2", f"{pipeline(schedule)}\n{zero}", batch=16)


@pytest.mark.parametrize("gather", ["use", "step"])
def test_zero_3_gathers_for_each_use_or_once_a_step(gather: str) -> None:
    zero = f"zero over dp {{ stage = 3, bucket = 4KB, gather = {gather} }}"
    check("gpt-tied-tiny", "pp=2 dp=2", f"{pipeline(parts=2)}\n{zero}")


@pytest.mark.parametrize("sequence", ["on", "off"])
@pytest.mark.parametrize("mesh", ["pp=2 tp=2", pytest.param("pp=2 dp=2 tp=2", marks=full)])
def test_with_tensor_parallelism(mesh: str, sequence: str) -> None:
    tensor = f"tensor over tp {{ {STYLES['llama-odd-tiny']}\n style = manual\n sequence = {sequence} }}"
    check("llama-odd-tiny", mesh, f"{pipeline(parts=2)}\n{tensor}\nclip grad_norm = 0.5")


def test_stages_send_slices_of_what_is_replicated() -> None:
    tensor = f"tensor over tp {{ {STYLES['llama-odd-tiny']}\n style = manual\n sequence = off }}"
    extra = f"{pipeline(parts=2, scatter_gather='on')}\n{tensor}"
    check("llama-odd-tiny", "pp=2 tp=2", extra)
    program = compile(
        loads(plan_text(get("llama-odd-tiny"), batch=8, mesh="pp=2 tp=2", microbatches=1, extra=extra), "p.plan")
    ).program
    assert any(message.over == ("tp",) for message in program.messages)


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_with_recomputation(schedule: str, policy: str) -> None:
    check(DEEP, "pp=2", f'{pipeline(schedule)}\nrecompute "layers.*" = {policy}')


def test_tied_weights_are_reduced_between_their_stages() -> None:
    program = compile(
        loads(plan_text(get("gpt-tied-tiny"), batch=8, mesh="pp=2", microbatches=1, extra=pipeline(parts=2)), "p.plan")
    ).program
    (tied,) = [bucket for bucket in program.buckets if len(bucket.stages) > 1]
    assert tied.axes == ("pp",) and tied.stages == (0, 1)
    for stream in program.streams:
        assert sum(i.op == "reduce" and i.target == tied.name for i in stream) == 1


def test_constants_are_computed_where_they_are_needed() -> None:
    """Rotary tables are not sent."""
    program = compile(
        loads(plan_text(get("llama-tiny"), batch=8, mesh="pp=2", microbatches=1, extra=pipeline(parts=2)), "p.plan")
    ).program
    assert [message.slot for message in program.messages] == ["layers.0/add_3", "d:layers.0/add_3"]
    assert next(call for call in program.calls if call.name == "begin.constants").stages == (0, 1)


def test_each_stage_holds_its_own_parameters() -> None:
    program = compile(
        loads(plan_text(get("llama-tiny"), batch=8, mesh="pp=2", microbatches=1, extra=pipeline(parts=2)), "p.plan")
    ).program
    stages = {p.name: p.stages for p in program.parameters}
    assert stages["embed.weight"] == (0,) and stages["head.weight"] == (1,)
    assert all(len(on) == 1 for on in stages.values())


@pytest.mark.parametrize(
    "extra, batch, code",
    [(pipeline(parts=1), 8, "W207"), (pipeline(parts=4), 8, None), (pipeline(parts=8), 2, "W206")],
)
def test_wasted_work_is_warned_of(extra: str, batch: int, code: str | None) -> None:
    plan = loads(plan_text(get("llama-tiny"), batch=batch, mesh="pp=2", microbatches=1, extra=extra), "p.plan")
    assert [warning.code for warning in compile(plan).warnings] == ([code] if code else [])
