"""Mixed precision: what the plan's dtypes do to the arithmetic, against the same arithmetic in eager PyTorch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiler.analysis.reference import Reference
from compiler.capture.autocast import autocasting, operator_lists
from compiler.capture.model import convert_parameters
from compiler.driver import compile
from compiler.dsl import loads
from compiler.precision import Autocast
from runtime.executor import StepResult
from runtime.program import Program, load
from runtime.session import Session
from runtime.simulate import simulate
from tests.zoo import ZooModel, get, loss_of, plan_text

ROWS = 16


class Net(nn.Module):
    """Its loss is a sum over samples in float32: terms of micro-batches and of ranks are just added."""

    def __init__(self, wide: int = 32):
        super().__init__()
        self.first, self.second = nn.Linear(8, wide), nn.Linear(wide, 1, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.second(nn.functional.gelu(self.first(x))).squeeze(-1).float() - y).square().sum() / ROWS


def batch_of(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=generator)
    return {"x": x, "y": x.sum(-1)}


NET = ZooModel(
    "net", "tests.test_precision:Net", {}, {"x": ("float32", ("B", 8)), "y": ("float32", ("B",))}, batch_of
)
SGD = "optimizer sgd { lr = 0.05, momentum = 0.9 }"
ADAMW = "optimizer adamw { lr = 1e-2, weight_decay = 0.1 }"


def program_of(folder: Path, entry: ZooModel, precision: str, optimizer: str = SGD, extra: str = "", **plan: Any) -> Program:
    text = plan_text(entry, batch=ROWS, optimizer=optimizer, extra=f"precision {{ {precision} }}\n{extra}", **plan)
    return load(compile(loads(text, "x.plan")).write(folder / "program"))


def steps(
    program: Program, batches: Sequence[Mapping[str, Tensor]], look: Callable[[Session, StepResult], Any]
) -> list[list[Any]]:
    """By rank and step, what `look` sees after it."""
    return simulate(program, lambda session: [look(session, session.step(batch)) for batch in batches])


def everything(session: Session, result: StepResult) -> dict[str, Any]:
    copies = {kind: {n: t.clone() for n, t in found.items()} for kind, found in
              (("gradients", session.gradients()), ("parameters", session.parameters()))}  # fmt: skip
    read = {name: session.state.parameter(name).clone() for name in session.state.specs}
    return {"loss": result.loss, "result": result, "read": read, **copies}


class Eager:
    """Training with a master copy, one operation at a time.

    `parts`: pieces of the batch, computed one after the other; gradients are summed in `reduce`, those of each rank by
    itself and then over ranks.
    """

    def __init__(self, model: nn.Module, optimizer: Callable[..., Any], compute: torch.dtype, reduce: torch.dtype):
        self.master, self.reduce, self.compute = model, reduce, compute
        self.read = copy.deepcopy(model)
        convert_parameters(self.read, compute)
        self.optimizer = optimizer(model.parameters())

    def step(self, batch: Mapping[str, Tensor], ranks: int, parts: int) -> tuple[float, dict[str, Tensor]]:
        loss, total = 0.0, {}
        pieces = {key: value.tensor_split(ranks * parts) for key, value in batch.items()}
        for rank in range(ranks):
            own: dict[str, Tensor] = {}
            for part in range(rank * parts, (rank + 1) * parts):
                self.read.zero_grad()
                one = self.read(**{key: value[part].to(self.compute) for key, value in pieces.items()})
                one.backward()
                loss += one.item()
                for name, parameter in self.read.named_parameters():
                    if name in own:
                        own[name].add_(parameter.grad)  # the sum is rounded, the term is not
                    else:
                        own[name] = parameter.grad.to(self.reduce, copy=True)
            total = {name: total[name] + own[name] if name in total else own[name] for name in own}
        for name, parameter in self.master.named_parameters():
            parameter.grad = total[name].to(parameter.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for master, read in zip(self.master.parameters(), self.read.parameters()):
                read.copy_(master)
        return loss, total


OPTIMIZERS = {
    SGD: lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=False, fused=True),
    ADAMW: lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1, fused=True),
}
SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
@pytest.mark.parametrize("ranks,parts", [(1, 1), (1, 4), (2, 1), (2, 4)])
@pytest.mark.parametrize("compute,reduce", [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16")])
def test_to_the_bit(build_dir: Path, compute: str, reduce: str, ranks: int, parts: int, optimizer: str) -> None:
    """Of a model whose terms are only added, every gradient and every master equals eager's bit for bit."""
    precision = f"compute = {compute}, reduce = {reduce}, master = fp32, loss_scale = none"
    program = program_of(build_dir, NET, precision, optimizer, mesh=f"dp={ranks}", microbatches=parts)
    batches = [batch_of(ROWS, k) for k in range(3)]
    torch.manual_seed(0)
    eager = Eager(Net(), OPTIMIZERS[optimizer], SHORT[compute], SHORT[reduce])
    truth = []
    for batch in batches:
        loss, gradients = eager.step(batch, ranks, parts)
        truth.append((loss, gradients, {n: p.detach().clone() for n, p in eager.master.named_parameters()}))
    for rank in steps(program, batches, everything):
        for found, (loss, gradients, masters) in zip(rank, truth, strict=True):
            assert found["loss"] == pytest.approx(loss, rel=1e-6)
            for name, master in masters.items():
                assert found["gradients"][name].dtype == SHORT[reduce] and found["read"][name].dtype == SHORT[compute]
                assert torch.equal(found["gradients"][name], gradients[name]), name
                assert torch.equal(found["parameters"][name], master), name
                assert torch.equal(found["read"][name], master.to(SHORT[compute])), name


def test_sums_in_the_dtype_of_the_products_are_rounded_once(build_dir: Path) -> None:
    """Products are added into a buffer of their own dtype as they arise, without a rounding in between: within one
    rounding of the largest partial sum for each micro-batch."""
    program = program_of(build_dir, NET, "compute = bf16, reduce = bf16, master = fp32", mesh="dp=1", microbatches=4)
    batch = batch_of(ROWS, 0)
    torch.manual_seed(0)
    _, truth = Eager(Net(), OPTIMIZERS[SGD], torch.bfloat16, torch.bfloat16).step(batch, 1, 4)
    ((found,),) = steps(program, [batch], everything)
    for name, gradient in truth.items():
        assert (found["gradients"][name] - gradient).abs().max() <= 4 * 2**-9 * gradient.abs().max()


def test_gradients_accumulate_in_the_dtype_of_reduce(build_dir: Path) -> None:
    """The last 15 of 16 micro-batches are too small to be seen in bfloat16 beside the first."""
    x = torch.full((ROWS, 8), 2.0**-6)
    x[0] = 16.0
    batch = {"x": x, "y": torch.full((ROWS,), 4.0)}
    found = {}
    for reduce in ("bf16", "fp32"):
        precision = f"compute = bf16, reduce = {reduce}, master = fp32"
        program = program_of(build_dir, NET, precision, mesh="dp=1", microbatches=ROWS)
        ((step,),) = steps(program, [batch], everything)
        found[reduce] = step["gradients"]["first.weight"]
    torch.manual_seed(0)
    _, truth = Eager(Net(), OPTIMIZERS[SGD], torch.bfloat16, torch.float32).step(batch, 1, ROWS)
    assert torch.equal(found["fp32"], truth["first.weight"])
    assert not torch.equal(found["fp32"], found["bf16"].float())


# -- transformers ----------------------------------------------------------------------------------------------------

PLANS = {
    "dp": dict(mesh="dp=2", microbatches=2),
    "tp": dict(mesh="dp=2 tp=2"),
}
TENSOR = """tensor over tp {
    column "layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"
    row "layers.*.attn.wo", "layers.*.mlp.w2"
    vocab "embed", "head"
    style = manual
}"""
LOWER = {
    "bf16": "compute = bf16, reduce = fp32, master = fp32",
    "fp16": "compute = fp16, reduce = fp32, master = fp32, loss_scale = 1024",
    "autocast": "autocast = on",
    "autocast fp16": "autocast = on, compute = fp16, loss_scale = 1024",
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", LOWER)
def test_twenty_steps_stay_close_to_float32(build_dir: Path, kind: str, plan: str) -> None:
    """Losses of training differ by rounding alone: far less than they fall, in every step."""
    entry = get("llama-tiny")
    batches = [entry.batch(ROWS, k % 4) for k in range(20)]
    losses = {}
    for precision in ("compute = fp32", LOWER[kind]):
        extra = TENSOR if "tp" in plan else ""
        program = program_of(build_dir, entry, precision, ADAMW, extra, **PLANS[plan])
        ranks = steps(program, batches, lambda session, result: result.loss)
        assert all(rank == ranks[0] for rank in ranks)
        losses[precision] = ranks[0]
    single, lower = losses.values()
    assert single[0] - single[-1] > 0.3
    assert max(abs(a - b) for a, b in zip(single, lower)) < 0.02


def eager_losses(entry: ZooModel, batches: list[dict[str, Tensor]], autocast: Autocast | None) -> tuple[list[float], dict]:
    """Of the model in eager PyTorch on one device, and the gradients of the first step."""
    model = entry.build(0)
    if autocast is None:
        read = copy.deepcopy(model)
        convert_parameters(read, torch.bfloat16)
    else:
        read = model
    optimizer, losses, gradients = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), [], {}
    for k, batch in enumerate(batches):
        read.zero_grad()
        with Reference(0, widen=False), operator_lists(autocast), autocasting(autocast):
            loss = loss_of(read(**{key: value.clone() for key, value in batch.items()}))
        loss.backward()
        losses.append(loss.item())
        if k == 0:
            gradients = {name: p.grad.float().clone() for name, p in read.named_parameters()}
        for master, parameter in zip(model.parameters(), read.parameters()):
            master.grad = parameter.grad.to(master.dtype)
        optimizer.step()
        if read is not model:
            with torch.no_grad():
                for master, parameter in zip(model.parameters(), read.parameters()):
                    parameter.copy_(master)
    return losses, gradients


@pytest.mark.parametrize("kind", ["bf16", "autocast", "autocast on CUDA"])
@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tied-tiny", "hf-llama"])
def test_transformers_against_eager(build_dir: Path, name: str, kind: str) -> None:
    """A few roundings of the lower dtype apart (2^-9 each, 2^-8 of a sum of terms that are as large): means are taken as
    sums and counts, so they are rounded in other places.

    Gradients are compared with the largest of their tensor; those of keys' biases are zero but for rounding.
    """
    entry = get(name)
    batches = [entry.batch(ROWS, k) for k in range(3)]
    cuda = "cluster { devices = 1, device = h100 }" if "CUDA" in kind else ""
    program = program_of(build_dir, entry, LOWER[kind.partition(" ")[0]], SGD, cuda, mesh="dp=1")
    autocast = Autocast("bfloat16", "cuda" if cuda else "cpu") if "autocast" in kind else None
    losses, gradients = eager_losses(entry, batches, autocast)
    (found,) = steps(program, batches, everything)
    assert [step["loss"] for step in found] == pytest.approx(losses, rel=2**-7)
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        error = (found[0]["gradients"][name].float() - gradient).abs().max() / max(gradient.abs().max(), 1e-3 * largest)
        assert error < 2**-6, f"{name}: {error}"
