"""Programs without a backward: what they return is what one device returns, in the original order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compiler.analysis.verify import verify
from compiler.driver import Options, compile
from compiler.dsl import loads
from runtime.factory import build
from runtime.program import load
from runtime.simulate import simulate
from tests.zoo import get, plan_text

FORWARD = plan_text(get("llama-tiny"), mesh="cp=2", optimizer="", extra="context over cp") + "mode = forward\n"
RING = "context over cp { attention = ring }"
PIPELINE = "pipeline over pp { schedule = %s, microbatches = 2 }"
TENSOR = 'tensor over tp { column "layers.*.attn.w[qkv]", row "layers.*.attn.wo", vocab "head" }\n'


@pytest.mark.parametrize(
    ("name", "mesh", "extra", "batch", "parts"),
    [
        ("llama-tiny", "cp=2", RING, 4, 1),
        ("vit-tiny", "dp=2", "", 4, 1),
        ("hf-qwen3", "dp=2 cp=2", RING, 6, 1),
        ("hf-gpt2", "dp=2 cp=3", "context over cp { attention = gather }", 7, 2),
        ("llama-tiny", "pp=2", PIPELINE % "1f1b", 3, 1),
        ("vit-tiny", "pp=2 dp=2", PIPELINE % "zb_h1", 4, 1),
        ("llama-small", "pp=2 cp=2", RING + "\n" + PIPELINE % "interleaved", 4, 1),
        ("llama-small", "pp=2 tp=2", TENSOR + PIPELINE % "auto", 8, 1),
        ("hf-qwen3", "pp=2 dp=2 cp=2", RING + "\n" + PIPELINE % "gpipe", 6, 1),
        pytest.param(
            "hf-gpt2-dropout", "cp=2", "context over cp { attention = ulysses }", 4, 1, marks=pytest.mark.full
        ),
    ],
)
def test_equal_to_one_device(name: str, mesh: str, extra: str, batch: int, parts: int, tmp_path: Path) -> None:
    text = (
        plan_text(get(name), batch=batch, mesh=mesh, microbatches=parts, extra=extra, optimizer="") + "mode = forward\n"
    )
    compilation = compile(loads(text, "forward.plan"), options=Options(widen=True))
    program = load(compilation.write(tmp_path / "program"))
    assert not any("backward" in i.op for stream in program.streams for i in stream) and not program.buckets
    torch.set_default_dtype(torch.float64)
    model = build(program.model["factory"], program.model["options"], program.model.get("base")).eval()
    given = get(name).batch(batch)
    with torch.no_grad():
        truth = model(**given)
    state = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    wanted = {"output": truth} if isinstance(truth, Tensor) else dict(truth)
    for found in simulate(program, lambda session: session.forward(given), state):
        for key, value in found.items():
            # transformers computes rotary tables and losses in single precision, the widened program in double.
            tolerance = 1e-6 if name.startswith("hf-") else 1e-10
            torch.testing.assert_close(value, wanted[key], rtol=tolerance, atol=tolerance, check_dtype=False)


def test_what_is_asked_for_is_in_the_table() -> None:
    found = {row.request: row.detail for row in compile(loads(FORWARD, "forward.plan")).asked}
    assert found["mode = forward"] == "1 tensor returned, nothing kept for a backward"


@pytest.mark.parametrize(
    ("name", "mesh", "extra"),
    [
        ("resnet-tiny", "dp=2", ""),  # running statistics
        ("hf-gpt2-dropout", "cp=2", RING),  # nothing dropped
        ("llama-small", "pp=2 tp=2", TENSOR + PIPELINE % "1f1b"),
    ],
)
def test_verify_compares_outputs_in_evaluation_mode(name: str, mesh: str, extra: str) -> None:
    text = plan_text(get(name), batch=6, mesh=mesh, extra=extra, optimizer="") + "mode = forward\n"
    verdict = verify(loads(text, "forward.plan"), steps=2)
    assert verdict.ok, str(verdict.worst)
    assert {d.what.split()[0] for d in verdict.deviations} == {"output"}
