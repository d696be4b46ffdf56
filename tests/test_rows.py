"""Rows that are not real: what a model makes of the batch as a whole is exact on padded and short batches, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler.analysis.verify import verify
from compiler.diagnostics import PlanError
from compiler.dsl import loads

EXACT = {
    "arange": lambda z, l: (l * torch.arange(len(l))).sum(),
    "arange by two": lambda z, l: (l * torch.arange(0, 2 * len(l), 2)).sum(),
    "ones, summed up to each row": lambda z, l: (l / torch.ones_like(l).cumsum(0)).sum(),
    "integers divided": lambda z, l: (l * (torch.arange(len(l)) / 3)).sum(),
    "sum of a list": lambda z, l: sum([l.mean(), z.square().mean()]),
}
COUNTED = {
    "linspace": lambda z, l: (l * torch.linspace(0, 1, len(l))).sum(),
    "logspace": lambda z, l: (l * torch.logspace(0, 0.5, len(l))).sum(),
    "window": lambda z, l: (l * torch.hann_window(len(l))).sum(),
    "arange from the end": lambda z, l: (l * torch.arange(len(l) - 1, -1, -1)).sum(),
    "arange flipped": lambda z, l: (l * torch.arange(len(l)).flip(0)).sum(),
    "the last row": lambda z, l: (l * (torch.arange(len(l)) == len(l) - 1)).sum(),
    "sum of ones": lambda z, l: l.sum() / torch.ones(len(l)).sum(),
    "sum of ones like": lambda z, l: l.sum() / torch.ones_like(l).sum(),
    "tensor of the count": lambda z, l: l.sum() / torch.tensor(float(l.numel())),
    "product with a triangle": lambda z, l: (torch.ones(len(z), len(z)).tril() @ z).square().mean(),
}
JOINED = {
    "softmax": lambda z, l: (l * l.softmax(0)).sum(),
    "log_softmax": lambda z, l: -z.log_softmax(0).mean(),
    "logsumexp": lambda z, l: z.flatten().logsumexp(0),
}
GROUPED = {
    "pairs": lambda z, l: (l.view(-1, 2)[:, 0] - l.view(-1, 2)[:, 1]).square().mean(),
    "groups": lambda z, l: z.view(2, -1, 5).mean(1).square().mean() + z.view(2, -1, 5).var(1).mean(),
    "pairs by unflatten": lambda z, l: z.unflatten(0, (-1, 2)).mean(1).square().mean(),
    "joined with features": lambda z, l: z.reshape(10, -1).softmax(-1).square().mean(),
}
"""Of a full batch of eight."""
STATISTICS = {"batch statistics alone": lambda z, l: F.batch_norm(z, None, None, training=True).mul(z.detach()).mean()}
LOSSES = EXACT | COUNTED | JOINED | GROUPED | STATISTICS


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Model(nn.Module):
    def __init__(self, loss: str):
        super().__init__()
        self.loss = LOSSES[loss]
        self.first, self.layers = nn.Linear(6, 5), nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Output:
        z = self.first(x)
        for layer in self.layers:
            z = z + torch.tanh(layer(z))
        return Output(self.loss(z, F.cross_entropy(z, y, reduction="none")), z)


def run(loss: str, mesh: str, parts: int, batch: int = 7) -> Any:
    return verify(
        loads(
            f"""
model "tests.test_rows:Model" {{ loss = "{loss}" }}
batch = {batch}
input x : float32[batch, 6]
input y : int64[batch]
mesh {mesh}
data over dp {{ microbatches = {parts} }}
optimizer sgd {{ lr = 0.1 }}
""",
            "rows.plan",
        ),
        steps=2,  # the second has a row less
    )


@pytest.mark.parametrize(("mesh", "parts"), [("dp=1", 1), ("dp=2", 1), ("dp=1", 2)])
@pytest.mark.parametrize("loss", EXACT)
def test_exact(loss: str, mesh: str, parts: int) -> None:
    assert run(loss, mesh, parts).ok


@pytest.mark.parametrize("loss", [*COUNTED, *JOINED])
def test_full_batches_are_exact_and_others_refused(loss: str) -> None:
    assert run(loss, "dp=1", 1).ok, "the program takes no short batch"
    with pytest.raises(PlanError, match="E204"):
        run(loss, "dp=2", 1)


@pytest.mark.parametrize("loss", JOINED)
def test_micro_batches_are_not_joined(loss: str) -> None:
    with pytest.raises(PlanError, match="E202"):
        run(loss, "dp=1", 2)


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2"])
@pytest.mark.parametrize("loss", GROUPED)
def test_samples_in_groups(loss: str, mesh: str) -> None:
    """Preference pairs, groups of answers to one prompt: the program takes full batches alone."""
    assert run(loss, mesh, 1, batch=8).ok


def test_batch_statistics_without_running_ones_are_of_all_ranks_and_micro_batches() -> None:
    assert run("batch statistics alone", "dp=3", 1).ok, "seven rows, padded to nine, and six"
    with pytest.raises(PlanError, match="E202"):
        run("batch statistics alone", "dp=2", 2, batch=8)
