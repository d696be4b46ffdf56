"""Mixed precision: what the plan's dtypes do to the arithmetic, against the same arithmetic in eager PyTorch."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import runtime
from compiler.analysis.reference import Reference
from compiler.analysis.verify import verify
from compiler.capture.autocast import autocasting, operator_lists
from compiler.capture.model import convert_parameters
from compiler.driver import compile
from compiler.dsl import loads
from compiler.precision import Autocast
from runtime.checkpoint import export_safetensors
from runtime.executor import StepResult
from runtime.instructions import Instruction
from runtime.log import read_log
from runtime.program import Program, load
from runtime.session import Session
from runtime.simulate import simulate
from runtime.train import train
from runtime.transport import LocalTransport
from runtime.transport.launch import launch
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


NET = ZooModel("net", "tests.test_precision:Net", {}, {"x": ("float32", ("B", 8)), "y": ("float32", ("B",))}, batch_of)
SGD = "optimizer sgd { lr = 0.05, momentum = 0.9 }"
ADAMW = "optimizer adamw { lr = 1e-2, weight_decay = 0.1 }"


def program_of(
    folder: Path, entry: ZooModel, precision: str, optimizer: str = SGD, extra: str = "", **plan: Any
) -> Program:
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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_cut_by_zero(build_dir: Path, stage: int) -> None:
    """Shards of masters are updated, shards of rounded copies gathered: the same numbers as whole ones, but for the
    order in which micro-batches and ranks are summed."""
    found = []
    for zero in ("", f"zero over dp {{ stage = {stage}, persist_below = 0 }}"):
        program = program_of(build_dir, NET, LOWER["bf16"], ADAMW, zero, mesh="dp=2", microbatches=2)
        found.append(steps(program, [batch_of(ROWS, k) for k in range(3)], shards)[1])
    assert {bucket.zero for bucket in program.buckets} == {stage}
    for whole, cut in zip(*found, strict=True):
        for name, master in whole["parameters"].items():
            assert cut["parameters"][name].dtype == cut["gradients"][name].dtype == torch.float32
            torch.testing.assert_close(cut["gradients"][name], whole["gradients"][name], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(cut["parameters"][name], master, rtol=1e-5, atol=1e-5)
        assert cut["dtypes"] == {(torch.bfloat16, torch.float32)}


def shards(session: Session, result: StepResult) -> dict[str, Any]:
    """Whole masters and gradients, and the dtypes of what the rank holds."""
    dtypes = {(store.shard.dtype, store.truth.dtype) for store in session.state.stores.values()}
    copies = {kind: {n: t.clone() for n, t in found.items()} for kind, found in
              (("gradients", session.gradients()), ("parameters", session.parameters()))}  # fmt: skip
    return {"dtypes": dtypes, **copies}


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

TENSOR = """tensor over tp {
    column "layers.*.attn.w[qkv]", "layers.*.mlp.w[13]"
    row "layers.*.attn.wo", "layers.*.mlp.w2"
    vocab "embed", "head"
    style = manual
}"""
PLANS = {
    "dp": (dict(mesh="dp=2", microbatches=2), ""),
    "tp": (dict(mesh="dp=2 tp=2"), TENSOR),
    "pp": (dict(mesh="pp=2 dp=2"), "pipeline over pp { microbatches = 2 }"),
    "cp": (dict(mesh="dp=1 cp=2"), "context over cp"),
    "zero": (dict(mesh="dp=2"), 'zero over dp { stage = 3, persist_below = 64 }\nrecompute "layers.*" = full'),
    "offload": (dict(mesh="dp=2", microbatches=2), "zero over dp { stage = 3, offload = all, bucket = 4KB }"),
}
LOWER = {
    "bf16": "compute = bf16, reduce = fp32, master = fp32",
    "fp16": "compute = fp16, reduce = fp32, master = fp32, loss_scale = 1024",
    "autocast": "autocast = on",
    "autocast fp16": "autocast = on, compute = fp16, loss_scale = 1024",
}


@pytest.mark.parametrize(
    "kind,plan",
    [
        *((kind, plan) for kind in LOWER for plan in ("dp", "tp")),
        *(("bf16", "pp"), ("autocast", "cp"), ("fp16", "zero"), ("fp16", "offload")),
    ],
)
def test_twenty_steps_stay_close_to_float32(build_dir: Path, kind: str, plan: str) -> None:
    """Losses of training differ by rounding alone: far less than they fall, in every step."""
    entry = get("llama-tiny")
    batches = [entry.batch(ROWS, k % 4) for k in range(20)]
    losses = {}
    for precision in ("compute = fp32", LOWER[kind]):
        mesh, extra = PLANS[plan]
        program = program_of(build_dir, entry, precision, ADAMW, extra, **mesh)
        ranks = steps(program, batches, lambda session, result: result.loss)
        assert all(rank == ranks[0] for rank in ranks)
        losses[precision] = ranks[0]
    single, lower = losses.values()
    assert single[0] - single[-1] > 0.3
    assert max(abs(a - b) for a, b in zip(single, lower)) < 0.02


def eager_losses(
    entry: ZooModel, batches: list[dict[str, Tensor]], autocast: Autocast | None
) -> tuple[list[float], dict]:
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


# -- loss scaling ----------------------------------------------------------------------------------------------------

WORLDS = {"dp=2": "", "dp=2 tp=2": TENSOR, "pp=2 dp=2": "pipeline over pp { microbatches = 2 }"}
WORLDS["dp=2, offloaded"] = "zero over dp { stage = 3, offload = all, bucket = 4KB }"
WORLDS["dp=2, optimizer offloaded"] = "zero over dp { stage = 1, offload = optimizer, bucket = 4KB }"
SCALED = "compute = bf16, reduce = fp32, master = fp32, loss_scale = dynamic"


def overflow_on_one_rank(session: Session, step: int) -> None:
    """The last rank's gradients get an infinite element in that step."""
    finite = session.executor.actions["finite"]

    def inject(instruction: Instruction) -> None:
        if session.steps == step and session.transport.rank == session.transport.size - 1:
            session.executor.gradients()[0][0] = math.inf
        finite(instruction)

    session.executor.actions["finite"] = inject


def scaled_run(session: Session, batches: Sequence[Mapping[str, Tensor]]) -> list[list[Any]]:
    """(skipped, scale, loss, a sum over this rank's parameters) of every step, with an overflow in step 2."""
    overflow_on_one_rank(session, 2)
    found = []
    for batch in batches:
        result = session.step(batch)
        total = sum(p.double().sum().item() for p in session.parameters().values())
        found.append([result.skipped, result.loss_scale, result.loss, total])
    return found


def scaled_program(folder: Path, world: str) -> tuple[Program, list[dict[str, Tensor]]]:
    entry = get("llama-tiny")
    extra = f"clip grad_norm = 0.5\n{WORLDS[world]}"
    return program_of(folder, entry, SCALED, ADAMW, extra, mesh=world.split(",")[0]), [entry.batch(ROWS, k) for k in range(4)]


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_leave_out_the_step_in_which_one_overflows(build_dir: Path, world: str) -> None:
    program, batches = scaled_program(build_dir, world)
    ranks = simulate(program, lambda session: scaled_run(session, batches))
    for rank in ranks:
        assert [step[0] for step in rank] == [False, False, True, False]
        assert [step[1] for step in rank] == [65536.0, 65536.0, 65536.0, 32768.0]
        assert rank[1][3] == rank[2][3] != rank[3][3]

    def plain(session: Session) -> float:
        """As if the batch had not been there: neither the optimizer's state nor its step count know of it."""
        results = [session.step(batch) for batch in (*batches[:2], batches[3])]
        assert not any(result.skipped for result in results)
        return sum(p.double().sum().item() for p in session.parameters().values())

    assert simulate(program, plain) == [rank[-1][3] for rank in ranks]


@pytest.mark.parametrize("world", WORLDS)
def test_processes_leave_out_the_same_step(build_dir: Path, world: str) -> None:
    program, batches = scaled_program(build_dir, world)
    torch.save(batches, build_dir / "batches.pt")
    code = f"from tests.test_precision import worker; worker({str(build_dir)!r})"
    assert launch(program.world, ["-c", code], env={"PYTHONPATH": str(Path(__file__).parents[1])}) == 0
    simulated = simulate(program, lambda session: scaled_run(session, batches))
    for rank, expected in enumerate(simulated):
        found = json.loads((build_dir / f"{rank}.json").read_text())
        assert [step[:2] for step in found] == [step[:2] for step in expected]
        assert [step[2:] for step in found] == [pytest.approx(step[2:], rel=1e-3) for step in expected]


def worker(folder: str) -> None:
    """One process of the test above."""
    with runtime.load(Path(folder) / "program") as session:
        found = scaled_run(session, torch.load(Path(folder) / "batches.pt"))
        (Path(folder) / f"{session.transport.rank}.json").write_text(json.dumps(found))


def test_the_scale_finds_its_size_in_float16(build_dir: Path) -> None:
    """A loss in float16 cannot be multiplied by 65536: the first step is left out, and the run goes on."""
    entry = get("llama-tiny")
    program = program_of(build_dir, entry, "compute = fp16, reduce = fp32, master = fp32", ADAMW, mesh="dp=2")
    (results, _) = steps(program, [entry.batch(ROWS, k) for k in range(3)], lambda session, result: result)
    assert [result.skipped for result in results] == [True, False, False]
    assert [result.loss_scale for result in results] == [65536.0, 32768.0, 32768.0]


@pytest.mark.parametrize(
    "clip", ["", "clip grad_norm = 0.1", "clip grad_value = 1e-3", "clip grad_norm = 0.1, grad_value = 1e-2"]
)
def test_a_scale_changes_no_result(build_dir: Path, clip: str) -> None:
    """It is taken off before gradients are clipped. A power of two changes no digit."""
    entry = get("llama-tiny")
    batches = [entry.batch(ROWS, k) for k in range(2)]
    found = []
    for scale in ("none", "2048"):
        precision = f"compute = bf16, reduce = fp32, master = fp32, loss_scale = {scale}"
        program = program_of(build_dir, entry, precision, ADAMW, clip, mesh="dp=2")
        found.append(steps(program, batches, everything)[0])
    for one, other in zip(*found, strict=True):
        assert (one["loss"], one["result"].grad_norms) == (other["loss"], other["result"].grad_norms)
        assert all(torch.equal(value, other["parameters"][name]) for name, value in one["parameters"].items())


@pytest.mark.parametrize("scale", ["dynamic", "1000"])
def test_verified_with_a_scale(scale: str) -> None:
    """In float64 the plan's dtypes change nothing; the scale is there all the same."""
    extra = f"precision {{ compute = fp16, loss_scale = {scale} }}\nclip grad_norm = 0.1\n{TENSOR}"
    verdict = verify(loads(plan_text(get("llama-odd-tiny"), 8, "dp=2 tp=2", extra=extra), "x.plan"), steps=2)
    assert verdict.ok, verdict.worst


# -- state -----------------------------------------------------------------------------------------------------------


def test_masters_survive_checkpoints(build_dir: Path) -> None:
    """Saved is what the optimizer updates; a plan of another precision, and another mesh, takes it."""
    batches = [batch_of(ROWS, k) for k in range(4)]
    lower = program_of(build_dir / "lower", NET, "compute = bf16, loss_scale = dynamic", ADAMW, mesh="dp=2")
    saved = build_dir / "step-2"

    def first(session: Session) -> tuple[dict, dict]:
        overflow_on_one_rank(session, 0)
        for batch in batches[:2]:
            session.step(batch)
        session.save(saved)
        masters = {name: p.clone() for name, p in session.parameters().items()}
        for batch in batches[2:]:
            session.step(batch)
        return masters, {name: p.clone() for name, p in session.parameters().items()}

    def again(session: Session) -> tuple[dict, dict, dict, Any]:
        session.restore(saved)
        masters = {name: p.clone() for name, p in session.parameters().items()}
        read = {name: session.state.parameter(name).clone() for name in masters}
        results = [session.step(batch) for batch in batches[2:]]
        return masters, read, {name: p.clone() for name, p in session.parameters().items()}, results[-1].loss_scale

    masters, last = simulate(lower, first)[0]
    assert {p.dtype for p in masters.values()} == {torch.float32}
    assert any(not torch.equal(p, p.bfloat16().float()) for p in masters.values())
    restored, read, then, scale = simulate(lower, again)[1]
    assert scale == 32768.0
    for name, master in masters.items():
        assert torch.equal(restored[name], master) and torch.equal(read[name], master.bfloat16())
        assert torch.equal(then[name], last[name])
    single = program_of(build_dir / "single", NET, "compute = fp32", ADAMW, mesh="dp=1")
    restored, read, _, scale = simulate(single, again)[0]
    assert scale is None and all(torch.equal(restored[name], master) for name, master in masters.items())
    half = program_of(build_dir / "half", NET, "compute = bf16, master = bf16", ADAMW, mesh="dp=1")
    restored, read, _, _ = simulate(half, again)[0]
    assert all(torch.equal(restored[name], master.bfloat16()) for name, master in masters.items())


def test_weights_are_exported_from_masters(build_dir: Path) -> None:
    program = program_of(build_dir, NET, "compute = bf16", mesh="dp=1")

    def run(session: Session) -> dict[str, Tensor]:
        session.step(batch_of(ROWS, 0))
        export_safetensors(session, build_dir / "w.safetensors")
        return {name: p.clone() for name, p in session.parameters().items()}

    (masters,) = simulate(program, run)
    found = load_file(build_dir / "w.safetensors")
    assert all(torch.equal(found[name], master) for name, master in masters.items())


def test_bytes_of_the_model_states(build_dir: Path) -> None:
    """2 for each parameter that is read, 4 for its gradient, 12 for master and averages (Rajbhandari et al. 2020 have
    gradients of 2 bytes)."""
    program = program_of(build_dir, get("llama-tiny"), LOWER["bf16"], ADAMW, mesh="dp=1")
    psi = sum(math.prod(parameter.shape) for parameter in program.parameters)

    def held(session: Session) -> tuple[int, int, int]:
        stores = session.state.stores.values()
        states = [
            t for o in session.optimizers.values() for group in o.state_tensors().values() for t in group.values()
        ]
        kinds = ([s.whole for s in stores], [s.gradient for s in stores], [*(s.master for s in stores), *states])
        return tuple(sum(t.nbytes for t in tensors if t is not None) for tensors in kinds)

    assert simulate(program, held) == [(2 * psi, 4 * psi, 12 * psi)]


# -- runs ------------------------------------------------------------------------------------------------------------


class Broken(nn.Module):
    """A finite loss, and a gradient that is nan whatever the scale: the square root's at zero, times zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x).squeeze(-1).float() * 0).abs().sqrt().sum()


def trained(folder: Path, factory: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[dict[str, Any]]]:
    """The status of a run in float16, and its log."""
    monkeypatch.chdir(folder)
    run = 'train { data = "synthetic", steps = 40, directory = "run" }'
    precision = "compute = fp16, reduce = fp32, loss_scale = dynamic"
    entry = dataclasses.replace(NET, factory=f"tests.test_precision:{factory}")
    program_of(folder, entry, precision, SGD, f"clip grad_norm = 1.0\n{run}", mesh="dp=1")
    return train(folder / "program", transport=LocalTransport()), read_log(folder / "run/log.jsonl")


def test_the_log_has_scale_and_norms(build_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    status, log = trained(build_dir, "Net", monkeypatch)
    assert status == 0 and len(log) == 40
    assert log[0]["loss_scale"] == 65536.0 and not log[-1]["skipped"]
    for one, following in itertools.pairwise(log):
        assert following["loss_scale"] == one["loss_scale"] * (0.5 if one["skipped"] else 1.0)
    assert log[-1]["grad_norms"].keys() == {"first", "second"}


def test_a_run_whose_gradients_are_never_finite_ends(build_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    status, log = trained(build_dir, "Broken", monkeypatch)
    assert status == 1 and len(log) == 17 + 3  # 65536 is halved to 1/2 in 17 steps
    assert all(record["skipped"] for record in log) and log[-1]["loss_scale"] == 2**-3
    out = capsys.readouterr().out
    assert "step 1 left out: gradients overflowed at loss scale 65536" in out
    assert "gradients overflowed for 3 steps in a row, at loss scales below 1" in out


@pytest.mark.parametrize("name", ["lora-tiny", "resnet-tiny", "vit-tiny", "encdec-tiny", "gpt-tiny", "mlp-tiny"])
@pytest.mark.parametrize("kind", ["bf16", "autocast"])
def test_the_zoo_in_lower_dtypes(build_dir: Path, name: str, kind: str) -> None:
    """Frozen parameters, batch statistics in float32, metrics, two sequences, dropout, ties: close to float32 over two
    ranks."""
    entry = get(name)
    batches = [entry.batch(ROWS, k) for k in range(3)]
    found = []
    for precision in ("compute = fp32", LOWER[kind]):
        program = program_of(build_dir, entry, precision, SGD, mesh="dp=2")
        found.append(steps(program, batches, lambda session, result: result.loss)[0])
    assert found[1] == pytest.approx(found[0], rel=2**-6)
    frozen = [parameter for parameter in program.parameters if not parameter.trained]
    assert all(state.dtype == "float32" for state in program.buffers if state.dtype.startswith(("float", "bfloat")))
    assert bool(frozen) == bool(entry.traits & {"frozen", "unused"})
