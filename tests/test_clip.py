"""Clipping and norms of gradients: each element of the model counts once, however it is cut, replicated and padded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor, nn

from compiler.analysis.reference import Reference
from compiler.analysis.verify import verify
from compiler.driver import Options, compile
from compiler.dsl import loads
from runtime.norms import group_of
from runtime.program import load
from runtime.simulate import simulate
from tests.zoo import get, loss_of, plan_text

TENSOR = """tensor over tp {
    column "layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"
    row "layers.*.attn.wo", "layers.*.mlp.w2"
    vocab "embed", "head"
    style = manual
    sequence = on
}"""
LAYOUTS = {
    "one device": ("dp=1", ""),
    "dp=2": ("dp=2", ""),
    "dp=3": ("dp=3", ""),
    "tp=2": ("dp=1 tp=2", TENSOR),
    "dp=2 tp=2": ("dp=2 tp=2", TENSOR),
    "pp=3": ("pp=3 dp=1", "pipeline over pp { microbatches = 2 }"),
    "pp=2 tp=2": ("pp=2 dp=1 tp=2", TENSOR + "\npipeline over pp { microbatches = 2 }"),
    "zero 1": ("dp=3", "zero over dp { stage = 1 }"),
    "zero 2 tp=2": ("dp=2 tp=2", TENSOR + "\nzero over dp { stage = 2, persist_below = 64 }"),
    "zero 3": ("dp=3", "zero over dp { stage = 3, persist_below = 64 }"),
}
CLIPS = ("clip grad_norm = 0.05", "clip grad_value = 1e-3", "clip grad_norm = 0.05, grad_value = 2e-2")


def plan_of(layout: str, clip: str) -> str:
    """A model of odd sizes: 37 classes, 3 heads, 7 tokens a row, over an odd number of rows."""
    mesh, extra = LAYOUTS[layout]
    return plan_text(get("llama-odd-tiny"), batch=7, mesh=mesh, extra=f"{clip}\n{extra}")


def eager_norms(batch: Mapping[str, Tensor], limit: float) -> tuple[float, dict[str, float]]:
    """Of the whole model and of its modules, by torch itself, of gradients clipped by value."""
    model = get("llama-odd-tiny").build(0).double()
    with Reference(0):
        loss_of(model(**batch)).backward()
    nn.utils.clip_grad_value_(model.parameters(), limit)
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(group_of(name), []).append(parameter.grad)
    each = {name: nn.utils.get_total_norm(gradients).item() for name, gradients in groups.items()}
    return nn.utils.get_total_norm([p.grad for p in model.parameters()]).item(), each


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_under_every_layout(layout: str, clip: str) -> None:
    verdict = verify(loads(plan_of(layout, clip), "x.plan"), steps=2)
    assert verdict.ok, verdict.worst


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_under_every_layout(build_dir: Path, layout: str) -> None:
    batch = get("llama-odd-tiny").batch(7)
    for clip, limit in ((CLIPS[0], math.inf), (CLIPS[2], 2e-2)):
        plan = loads(plan_of(layout, clip), "x.plan")
        program = load(compile(plan, options=Options(widen=True)).write(build_dir / "program"))
        norm, each = eager_norms(batch, limit)
        for result in simulate(program, lambda session: session.step(batch)):
            assert result.grad_norm == pytest.approx(norm, rel=1e-10)
            assert result.grad_norms.keys() == {"embed", "layers.0", "layers.1", "layers.2", "norm", "head"}
            assert result.grad_norms == {name: pytest.approx(value, rel=1e-10) for name, value in each.items()}


def test_without_a_limit_on_the_norm_there_is_none(build_dir: Path) -> None:
    batch = get("llama-odd-tiny").batch(7)
    program = load(compile(loads(plan_of("dp=2", CLIPS[1]), "x.plan")).write(build_dir / "program"))
    for result in simulate(program, lambda session: session.step(batch)):
        assert result.grad_norm is None and result.grad_norms == {}


@pytest.mark.parametrize(
    "name,group",
    [
        ("layers.3.attn.wq.weight", "layers.3"),
        ("model.layers.11.mlp.up_proj.weight", "model.layers.11"),
        ("stages.0.1.bn1.bias", "stages.0"),
        ("model.norm.weight", "model.norm"),
        ("head.weight", "head"),
        ("0.weight", "0"),
        ("scale", "scale"),
    ],
)
def test_the_module_that_a_parameter_counts_with(name: str, group: str) -> None:
    assert group_of(name) == group
