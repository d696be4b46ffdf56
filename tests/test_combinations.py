"""Strategies together, on models with awkward corners: all equal to one device, or refused with a diagnostic."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import nn

from compiler.analysis.verify import verify
from compiler.diagnostics import PlanError
from compiler.driver import compile
from compiler.dsl import loads
from tests.zoo import get, plan_text

full = pytest.mark.full
CLIP = "clip grad_norm = 0.5"


def strategy(statement: str, **options: object) -> str:
    return f"{statement} {{ {', '.join(f'{name} = {value}' for name, value in options.items())} }}"


def pipeline(schedule: str = "1f1b", parts: int = 2, **options: object) -> str:
    return strategy("pipeline over pp", schedule=schedule, microbatches=parts, **options)


def tensor(sequence: str = "on", **options: object) -> str:
    return strategy("tensor over tp", style="auto", sequence=sequence, **options)


def context(kind: str = "ring", axes: str = "cp", **options: object) -> str:
    return strategy(f"context over {axes}", attention=kind, **options)


def zero(stage: int = 3, axes: str = "dp", **options: object) -> str:
    return strategy(f"zero over {axes}", stage=stage, bucket="4KB", **options)


def check(text: str) -> None:
    verdict = verify(loads(text, "combination.plan"), steps=2)
    assert verdict.ok, str(verdict.worst)


def check_zoo(name: str, mesh: str, *statements: str, batch: int = 8, parts: int = 1) -> None:
    check(plan_text(get(name), batch=batch, mesh=mesh, microbatches=parts, extra="\n".join(statements)))


@pytest.mark.parametrize(
    "name, mesh, statements",
    [
        ("llama-small", "pp=2 dp=2 tp=2", (pipeline("zb_v", 4), tensor(overlap="on"), zero(), CLIP)),
        ("llama-tiny", "pp=2 cp=2 tp=2", (pipeline(), tensor(), context(), zero(axes="cp"), CLIP)),
        ("llama-odd-tiny", "pp=2 dp=2 tp=4", (pipeline(), tensor(), zero(), CLIP)),
        ("encdec-tiny", "dp=2 cp=2 tp=2", (tensor(), context("gather"), zero(axes="dp, cp"), CLIP)),
        ("mlp-tiny", "pp=2 dp=2 tp=2", (pipeline(), tensor("off"), zero(), CLIP)),
        *(
            pytest.param(*case, marks=full)
            for case in [
                ("gpt-tied-tiny", "pp=2 dp=4 tp=2", (pipeline(), tensor(), zero(hybrid=2, persist_below=200, offload="all"))),
                ("llama-tiny", "pp=2 dp=2 cp=2", (pipeline("dualpipe_v", 4), context(), zero(axes="dp, cp", hybrid=2), CLIP)),
                ("lora-tiny", "dp=2 cp=2 tp=2", (tensor(), context(), zero(axes="dp, cp"), 'recompute "*" = full')),
                ("hf-gpt2-dropout", "pp=2 cp=2 tp=2", (pipeline(), tensor(), context("gather"), CLIP)),
                ("hf-qwen3", "pp=2 cp=2 tp=2", (pipeline("zb_h1", 4), tensor(), context(), zero(axes="cp"))),
                ("vit-tiny", "pp=2 dp=2 tp=2", (pipeline(), tensor(), zero(), CLIP)),
            ]
        ),
    ],
)  # fmt: skip
def test_strategies_together(name: str, mesh: str, statements: tuple[str, ...]) -> None:
    check_zoo(name, mesh, *statements)


@pytest.mark.parametrize("name", ["llama-tiny", pytest.param("llama-small", marks=full)])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_heads_are_exchanged_within_those_of_a_tensor_parallel_rank(name: str, order: str) -> None:
    check_zoo(name, "cp=2 tp=2", tensor("off"), context("ulysses", order=order), batch=4)


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2 dp=2", pytest.param("pp=3", marks=full)])
def test_stages_reduce_what_they_share_in_one_order(mesh: str) -> None:
    """Several buckets of tied parameters, which the stages complete in different orders."""
    text = plan_text(get("mlp-small"), batch=8, mesh=f"{mesh} one=1", extra=pipeline(parts=4))
    over = "dp, one" if "dp" in mesh else "one"
    check(text.replace("data over dp\n", "") + f"data over {over} {{ bucket = 1KB }}\n")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Partly(nn.Module):
    """Tied weights, of which the last stage has a gradient for one alone, or for none."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.bias = bias
        self.first, self.layers, self.head = nn.Linear(8, 8), nn.ModuleList(Layer() for _ in range(4)), nn.Linear(8, 4)

    def forward(self, x, y):  # type: ignore[no-untyped-def]
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        h = h + F.linear(h, self.first.weight.detach())
        return F.cross_entropy(self.head(h * self.first.bias if self.bias else h), y)


def own(name: str, options: str, mesh: str, *statements: str, batch: int = 8) -> str:
    return "\n".join(
        [
            f'model "{__file__}:{name}" {{ {options} }}',
            f"input x : float32[{batch}, 8]\ninput y : int64[{batch}]\nmesh {mesh}",
            *(["data over dp"] if "dp=" in mesh else []),
            *statements,
            "optimizer adamw { lr = 1e-2 }\n",
        ]
    )


@pytest.mark.parametrize("bias", ["on", "off"])
@pytest.mark.parametrize("stage", [0, 2, pytest.param(3, marks=full)])
def test_a_stage_without_gradients_for_its_copy(stage: int, bias: str) -> None:
    check(own("Partly", f"bias = {bias}", "pp=2 dp=2", pipeline(), *([zero(stage)] if stage else []), CLIP))


@pytest.mark.parametrize("mesh, statement", [("dp=2", ""), ("pp=2 dp=2", pipeline()), ("dp=2 tp=2", tensor())])
def test_weights_and_tables_with_as_many_rows_as_the_batch_are_no_samples(mesh: str, statement: str) -> None:
    """Eight rows: of the batch, of the keys' weight, and of the rotary tables, which are arguments of an opaque layer."""
    entry = get("llama-tiny")
    text = plan_text(entry, batch=8, mesh=mesh, extra=f'{statement}\nopaque "layers.*"\nper_sample "layers.*"')
    assert "seq = 8" in text
    check(text)


class Turned(nn.Module):
    """What crosses its layers, and the gradients of that, are views with other strides than a fresh tensor's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 4)

    def forward(self, x, y):  # type: ignore[no-untyped-def]
        h = x.unflatten(-1, (6, 6))
        for layer in self.layers:
            h = layer(h).transpose(1, 2).tanh() + h.mT
        return F.cross_entropy(self.head(h).mean(1), y)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
def test_what_stages_send_may_have_any_strides(schedule: str) -> None:
    text = own("Turned", "", "pp=2 dp=2", pipeline(schedule))
    check(text.replace("float32[8, 8]", "float32[8, 36]"))


@pytest.mark.parametrize(
    "statement",
    ['recompute "layer.*" = full', 'segment "layer.1"', 'per_sample "layer.*"', 'local_statistics "layer.*.norm"'],
)
def test_what_names_nothing_is_an_error(statement: str) -> None:
    with pytest.raises(PlanError) as caught:
        compile(loads(plan_text(get("llama-tiny"), extra=statement), "x.plan"))
    (found,) = caught.value.diagnostics
    assert found.code == "E106" and found.message.startswith(f"`{statement.split()[0]}` names nothing in the model")
    assert found.help[0].startswith("did you mean `layers.")


def test_a_decay_of_nothing_is_reported() -> None:
    text = plan_text(get("llama-tiny"), optimizer='optimizer adamw { no_decay "*.bias", "*norm*" }')
    assert [w.message for w in compile(loads(text, "x.plan")).warnings] == [
        '`no_decay "*.bias"` names no parameter of the model'
    ]
