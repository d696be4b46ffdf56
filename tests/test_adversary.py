"""Models that once came out wrong or crashed, each for its kind: found by people who tried to break planc."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compiler.analysis.verify import TOLERANCE, verify
from compiler.diagnostics import PlanError
from compiler.dsl import loads


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, y):  # type: ignore[no-untyped-def]
        return F.cross_entropy(self.b(self.body(self.a(x))), y)


class Circular(Base):
    """A decomposition that writes into views of an empty tensor."""

    def body(self, h):  # type: ignore[no-untyped-def]
        return F.pad(h.unsqueeze(1), (2, 2), mode="circular").squeeze(1)[:, :8]


class Recurrent(Base):
    """A list result with one element."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.GRU(8, 8, batch_first=True)

    def body(self, h):  # type: ignore[no-untyped-def]
        return self.m(h.unsqueeze(1))[0][:, -1]


class Converted(Base):
    """A conversion in the constructor, with a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(8, 8)
        self.c.weight = self.a.weight
        self.double().float()

    def body(self, h):  # type: ignore[no-untyped-def]
        return torch.tanh(self.c(h))


class Diagonal(Base):
    """The mask of a contrastive loss, which joins all rows."""

    def body(self, h):  # type: ignore[no-untyped-def]
        similar = h @ h.t()
        similar.fill_diagonal_(0.0)
        return similar.softmax(-1) @ h


class Norm3(Base):
    """A gradient formula with an in-place power."""

    def body(self, h):  # type: ignore[no-untyped-def]
        return h / (1 + torch.linalg.vector_norm(h, 3, dim=-1, keepdim=True))


class Spaced(Base):
    """A creation without a dtype."""

    def body(self, h):  # type: ignore[no-untyped-def]
        return h * torch.linspace(0, 1, 8)


class MovingAverage(Base):
    """A buffer that is changed in place from a batch mean, and read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.zeros(8))

    def body(self, h):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            self.m.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h - self.m


class ByRows(Base):
    """Control flow on the number of rows."""

    def body(self, h):  # type: ignore[no-untyped-def]
        return h * 2 if h.shape[0] > 5 else h


class Weighted(Base):
    """A loss whose weights are a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.tensor([0.5, 1.0, 2.0, 1.5]))

    def forward(self, x, y):  # type: ignore[no-untyped-def]
        return F.cross_entropy(self.b(self.a(x)), y, weight=self.w)


class RunningInstance(Base):
    def __init__(self) -> None:
        super().__init__()
        self.i = nn.InstanceNorm1d(2, track_running_stats=True)

    def body(self, h):  # type: ignore[no-untyped-def]
        return self.i(h.view(-1, 2, 4)).flatten(1)


class Ordered(Base):
    """What mixes samples depends on the batch alone, and is not an input itself."""

    def forward(self, x, y):  # type: ignore[no-untyped-def]
        return F.cross_entropy(self.b(self.a(torch.sort(x * 2, 0)[0])), y)


def plan(model: type, batch: int, ranks: int, parts: int):  # type: ignore[no-untyped-def]
    return loads(f"""
model "tests.test_adversary:{model.__name__}"
batch = {batch}
input x : float32[batch, 8]
input y : int64[batch]
mesh dp={ranks}
data over dp {{ microbatches = {parts} }}
optimizer sgd {{ lr = 0.05 }}
""")


MODELS = [Circular, Recurrent, Converted, Diagonal, Norm3, Spaced, MovingAverage, ByRows, Weighted]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_equal_to_one_device(model: type, ranks: int) -> None:
    verdict = verify(plan(model, 6, ranks, 1))
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


@pytest.mark.parametrize("model", [Weighted, Ordered])
def test_what_parameters_do_not_reach_is_hoisted(model: type) -> None:
    verdict = verify(plan(model, 8, 2, 2))
    assert verdict.worst.error <= TOLERANCE, str(verdict.worst)


@pytest.mark.parametrize(
    ("model", "batch", "parts", "code"),
    [(Diagonal, 7, 1, "E204"), (ByRows, 7, 1, "E204"), (Diagonal, 8, 2, "E202"), (RunningInstance, 8, 1, "E120")],
)
def test_refused_with_a_reason(model: type, batch: int, parts: int, code: str) -> None:
    with pytest.raises(PlanError) as caught:
        verify(plan(model, batch, 2, parts))
    assert [d.code for d in caught.value.diagnostics] == [code]
