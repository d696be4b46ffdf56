"""Initial values: the same as on one device, built once, and of a file no more is read than a rank holds."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import runtime
from compiler.driver import compile
from compiler.dsl import loads
from runtime import initial
from runtime.checkpoint import InitialWeights
from runtime.initial import initial_buffers, initial_state
from runtime.mesh import Mesh
from runtime.program import Program, load
from runtime.session import Session
from runtime.state import RankState
from runtime.transport import run_ranks
from runtime.transport.launch import launch
from tests.analysis.tracking import Storages
from tests.test_tensor import STYLES
from tests.zoo import get, plan_text

ZERO = "zero over dp { stage = 3, bucket = 2kB }"
TENSOR = f"tensor over tp {{ {STYLES['llama-odd-tiny']}\n style = manual\n sequence = on }}"
PLANS = {
    "dp": ("gpt-tied-tiny", "dp=2", ""),
    "batchnorm": ("resnet-tiny", "dp=2", ""),
    "zero": ("llama-odd-tiny", "dp=3", ZERO),
    "masters": ("llama-tiny", "dp=2", "zero over dp { stage = 1 }\nprecision { compute = bf16, master = fp32 }"),
    "tensor": ("llama-odd-tiny", "dp=2 tp=2", f"{ZERO}\n{TENSOR}"),
    "stages": ("llama-tiny", "pp=2 dp=2", f"{ZERO}\npipeline over pp {{ schedule = 1f1b, microbatches = 2 }}"),
}


def compiled(name: str, folder: Path) -> Program:
    model, mesh, extra = PLANS[name]
    return load(compile(loads(plan_text(get(model), 12, mesh, extra=extra), "initial.plan")).write(folder / name))


def held(state: RankState) -> list[Tensor]:
    """Everything, padding included."""
    stores = [
        tensor for s in state.stores.values() for tensor in (s.whole, s.shard, s.host, s.master) if tensor is not None
    ]
    return [*stores, *state.alone.values(), *state.buffers.values()]


@pytest.mark.parametrize("name", PLANS)
def test_one_builds_for_all(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the simulator, in chunks of a few rows: to the bit what each rank takes of the whole model."""
    program = compiled(name, tmp_path)
    full = initial_state(program, 0)
    monkeypatch.setattr(initial, "CHUNK", 1000)

    def body(transport: runtime.transport.Transport) -> None:
        with Session(program, transport) as session:
            wanted = RankState(program, session.context.sizes, session.context.coords, transport.device)
            wanted.fill(full)
            for mine, its in zip(held(session.state), held(wanted), strict=True):
                assert torch.equal(mine, its)

    with patch.object(initial, "build", wraps=initial.build) as build:
        run_ranks(program.world, body)
    assert build.call_count == 1


def test_processes(tmp_path: Path) -> None:
    """Over gloo: what the ranks hold together is the whole model."""
    program = compiled("zero", tmp_path)
    assert launch(3, ["-m", "tests.runtime.test_initial", str(tmp_path / "zero")]) == 0
    found, full = torch.load(tmp_path / "zero" / "state.pt"), initial_state(program, 0)
    assert all(torch.equal(found[p.name], full[p.name]) for p in program.parameters)


def write_state(folder: Path) -> None:
    with patch.object(initial, "CHUNK", 1000), runtime.load(folder) as session:
        state = session.state_dict()
        if session.transport.rank == 0:
            torch.save(state, folder / "state.pt")


# -- weights from files ------------------------------------------------------------------------------------------------

LARGE = """
model "dsl_examples.models.llama:Llama" {{ layers = 2, dim = 512, heads = 8, kv_heads = 4, vocab = 4096, context = 16 }}
batch = 8
seq = 16
input tokens : int64[batch, seq]
input labels : int64[batch, seq]
mesh {mesh}
{strategies}
"""


@pytest.mark.parametrize(
    "mesh, strategies",
    [
        ("dp=4", "data over dp\nzero over dp { stage = 3 }"),
        ("pp=2", "pipeline over pp { schedule = gpipe, microbatches = 2 }"),
        (
            "tp=4",
            'tensor over tp { vocab "embed", "head"\n column "layers.*.attn.w[qkv]"\n row "layers.*.attn.wo"\n style = manual }',
        ),
    ],
    ids=("zero", "stages", "tensor"),
)
def test_no_more_is_read_than_a_rank_holds(mesh: str, strategies: str, tmp_path: Path) -> None:
    program = load(compile(loads(LARGE.format(mesh=mesh, strategies=strategies), "large.plan")).write(tmp_path / "p"))
    file = tmp_path / "model.safetensors"
    full = initial_state(program, 0)
    save_file({p.name: full[p.name] for p in program.parameters}, file)
    axes = Mesh(tuple(program.mesh.items()))
    for rank in range(2):
        weights = InitialWeights(program, file)
        state = RankState(program, program.mesh, axes.coords(rank), torch.device("cpu"))
        views = {name: weights[name] for name in (*state.specs, *state.buffers)}
        assert all(
            any(view.data_ptr() in part for part in maps(file)) for name, view in views.items() if name in state.specs
        )
        with Storages([*views.values(), *held(state)]) as storages:
            state.fill(views)
        # One part at a time, and where its rows are: what is not cut is not copied at all.
        parts = [math.prod(state.local_shape(spec)) for spec in state.specs.values() if spec.cuts]
        assert storages.most <= 4 * max(parts, default=0) + 64 * 4096


def maps(file: Path) -> list[range]:
    """The addresses at which a file is mapped."""
    found = re.findall(rf"^(\w+)-(\w+) .* {re.escape(str(file))}$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return [range(int(start, 16), int(end, 16)) for start, end in found]


# -- buffers without parameters ----------------------------------------------------------------------------------------


class Tables(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3) if kind == "random parameters" else torch.ones(3))
        self.linear = nn.Linear(3, 3)
        if kind == "of parameters":
            table = self.linear.weight.detach().sum(0)
        else:
            table = torch.rand(3) if kind == "random" else torch.arange(3.0)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.weight * self.table).sum()


@pytest.mark.parametrize("kind, builds", [("plain", 1), ("random parameters", 2), ("of parameters", 2), ("random", 2)])
def test_buffers_alone(kind: str, builds: int, tmp_path: Path) -> None:
    plan = f'model "tests.runtime.test_initial:Tables" {{ kind = "{kind}" }}\nbatch = 4\ninput x : fp32[batch, 3]\nmesh dp=2\ndata over dp'
    program = load(compile(loads(plan, "tables.plan")).write(tmp_path / "p"))
    names = [buffer.name for buffer in program.buffers]
    with patch.object(initial, "build", wraps=initial.build) as build:
        found = initial_buffers(program, 0, names)
    assert build.call_count == builds
    full = initial_state(program, 0)
    assert names and all(torch.equal(found[name], full[name]) for name in names)


if __name__ == "__main__":
    write_state(Path(sys.argv[1]))
