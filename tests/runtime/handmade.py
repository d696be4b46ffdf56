"""Programs written by hand, as the compiler might: they need no compiler.

`write_program`: a two-layer network over any mesh of `dp` and `tp`, with what checkpoints must cope with: uneven cuts
with padding, a tied name, buffers of both kinds, a frozen parameter, two buckets, AdamW's state.
`write_bigram`: a language model that sees one byte, over `dp`, on batches of any number of rows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.instructions import parse_stream
from runtime.program import Bucket, Buffer, Call, Input, Output, Parameter, Program
from runtime.program import load, save

IN, HIDDEN, OUT = 4, 5, 3

CODE = """
NEEDED, GIVEN, WANTED = (0, 2, 3, 4, 5), (0,), (2, 3, 4)


def forward(ctx, x, target, w1, b1, w2, scale):
    h = ctx.mask(torch.tanh(x @ w1.T + b1), HIDDEN_CUT, HIDDEN, "sum")
    y = ctx.all_reduce(h @ w2.T, ("tp",), "sum") * scale
    difference = y - target
    loss = difference.square().sum() / ctx.batch
    return (loss,), (h, difference)


def backward(ctx, given):
    x, w1, b1, w2, scale, h, difference, gradient = given
    given.clear()
    gy = difference * (2.0 / ctx.batch) * gradient * scale
    gh = ctx.mask((gy @ w2) * (1 - h * h), HIDDEN_CUT, HIDDEN, "sum")
    return gh.T @ x, gh.sum(0), gy.T @ h
"""


class Net(nn.Module):
    """The model whose initialisation the program takes. `again.w2` is `w2`."""

    def __init__(self, dtype: str = "float64") -> None:
        super().__init__()
        kind = getattr(torch, dtype)
        self.w1 = nn.Parameter(torch.randn(HIDDEN, IN, dtype=kind))
        self.b1 = nn.Parameter(torch.randn(HIDDEN, dtype=kind))
        self.w2 = nn.Parameter(torch.randn(OUT, HIDDEN, dtype=kind))
        self.frozen = nn.Parameter(torch.randn(2, 2, dtype=kind))
        self.again = nn.Module()
        self.again.w2 = self.w2
        self.register_buffer("scale", torch.ones((), dtype=kind))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


TRAIN = {
    "data": "synthetic", "steps": 6, "epochs": None, "seed": 3, "shuffle": True, "save_every": None, "keep": 2,
    "log": None, "directory": None, "tail": "drop",
}  # fmt: skip


def write_program(
    folder: Path, dp: int = 1, tp: int = 1, rows: int = 12, dtype: str = "float64", total: int | None = None,
    **train: Any,
) -> Program:  # fmt: skip
    """A program folder for a mesh, loaded again. `train` replaces options of the plan's `train { … }`; `total`: the
    steps in which the learning rate falls, if not those of the run."""
    cut = f"tp:1:{HIDDEN}:1"
    hidden = math.ceil(HIDDEN / tp)
    parameters = (
        Parameter("w1", (HIDDEN, IN), dtype, True, f"0:{cut}"),
        Parameter("b1", (HIDDEN,), dtype, True, f"0:{cut}"),
        Parameter("w2", (OUT, HIDDEN), dtype, True, f"1:{cut}"),
        Parameter("frozen", (2, 2), dtype, False),
    )
    axes = ("dp",) if dp > 1 else ()
    stream = ["forward net @0", "backward net @0"]
    if axes:
        stream += ["reduce bucket0", "reduce bucket1", "wait reduce bucket0", "wait reduce bucket1"]
    stream += ["clip", "step bucket0", "step bucket1", "report"]
    program = Program(
        name="handmade",
        mesh={"dp": dp, "tp": tp},
        microbatches=1,
        batch=rows,
        rows=rows,
        ragged=False,
        full_batches=False,
        batch_axes=axes,
        model={"factory": "tests.runtime.handmade:Net", "options": {"dtype": dtype}, "base": None},
        inputs=(Input("x", dtype, (rows, IN)), Input("target", dtype, (rows, OUT))),
        parameters=parameters,
        ties={"again.w2": "w2"},
        buffers=(Buffer("scale", (), dtype), Buffer("table", (3,), "float32", persistent=False)),
        constants=(),
        outputs=(Output("loss", "net/loss", axes),),
        kinds={"net": "segments/net.py"},
        prologue=None,
        calls=(
            Call(
                "net", "net",
                ("batch:x", "batch:target", "param:w1", "param:b1", "param:w2", "buffer:scale"),
                ("net/loss",), ("param:w1", "param:b1", "param:w2"),
            ),
        ),
        buckets=(
            # b1 has no weight decay.
            Bucket("bucket0", dtype, axes, ("w2", "b1"), 1, OUT * hidden + hidden),
            Bucket("bucket1", dtype, axes, ("w1",), 1, hidden * IN),
        ),
        optimizer={"name": "adamw", "lr": 0.05, "weight_decay": 0.1, "schedule": "cosine", "warmup": 2, "total": total},
        clip={"grad_norm": 1.0},
        train=TRAIN | train,
        streams=(tuple(parse_stream("\n".join(stream))),),
    )  # fmt: skip
    names = f'import torch\n\nHIDDEN = {HIDDEN}\nHIDDEN_CUT = "1:{cut}"\n'
    return _write(program, folder, names + CODE)


def _write(program: Program, folder: Path, code: str) -> Program:
    save(program, folder)
    (folder / "segments").mkdir(exist_ok=True)
    (folder / "segments" / "net.py").write_text(code)
    (folder / "plan.plan").write_text("# written by hand\n")
    return load(folder)


def batch(step: int, rows: int = 12, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The batch of a step, random."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(rows, IN, generator=generator, dtype=dtype)
    return {"x": x, "target": torch.randn(rows, OUT, generator=generator, dtype=dtype)}


BIGRAM = """
NEEDED, GIVEN, WANTED = (), (0,), (2,)


def forward(ctx, tokens, labels, table):
    def real(x):
        return ctx.mask(x, ROWS_CUT, ("rows", 1), "sum")

    counts = labels != -100
    logits = table[tokens].log_softmax(-1)
    each = -logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * counts
    count = ctx.all_reduce(real(counts.sum(1)).sum(), ("dp",), "sum")
    weights = real(counts.to(table.dtype)) / count
    return (real(each.sum(1)).sum() / count,), (tokens, labels, logits, weights)


def backward(ctx, given):
    tokens, labels, logits, weights, gradient = given
    given.clear()
    rows = logits.exp()
    rows.scatter_add_(-1, labels.clamp(min=0)[..., None], -torch.ones_like(weights)[..., None])
    rows = rows * (weights * gradient)[..., None]
    out = torch.zeros(VOCAB, VOCAB, dtype=rows.dtype).index_add_(0, tokens.flatten(), rows.flatten(0, 1))
    return (out,)
"""


class Bigram(nn.Module):
    """The next byte's logits by the last byte."""

    def __init__(self, dtype: str = "float64") -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(256, 256, dtype=getattr(torch, dtype)))


def write_bigram(
    folder: Path, dp: int = 1, rows: int = 8, seq: int = 16, dtype: str = "float64", **train: Any
) -> Program:  # fmt: skip
    """The program folder of a byte-level bigram model, which takes short batches."""
    axes = ("dp",) if dp > 1 else ()
    padded = math.ceil(rows / dp) * dp
    stream = ["forward net @0", "backward net @0", *(["reduce b", "wait reduce b"] if axes else []), "step b", "report"]
    program = Program(
        name="bigram",
        mesh={"dp": dp},
        microbatches=1,
        batch=padded,
        rows=rows,
        ragged=True,
        full_batches=False,
        batch_axes=axes,
        model={"factory": "tests.runtime.handmade:Bigram", "options": {"dtype": dtype}, "base": None},
        inputs=(
            Input("tokens", "int64", (padded, seq), below=256),
            Input("labels", "int64", (padded, seq), below=256, ignore=-100),
        ),
        parameters=(Parameter("table", (256, 256), dtype, True),),
        ties={},
        buffers=(),
        constants=(),
        outputs=(Output("loss", "net/loss", axes),),
        kinds={"net": "segments/net.py"},
        prologue=None,
        calls=(Call("net", "net", ("batch:tokens", "batch:labels", "param:table"), ("net/loss",), ("param:table",)),),
        buckets=(Bucket("b", dtype, axes, ("table",), 1, 256 * 256),),
        optimizer={"name": "sgd", "lr": 10.0, "momentum": 0.5},
        clip=None,
        train=TRAIN | {"tail": "pad"} | train,
        streams=(tuple(parse_stream("\n".join(stream))),),
    )
    return _write(program, folder, f'import torch\n\nVOCAB = 256\nROWS_CUT = "0:dp:1:{padded}:1"\n' + BIGRAM)
