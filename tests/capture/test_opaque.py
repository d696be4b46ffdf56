"""Opaque modules run as they are, and are still trained."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compiler.capture import capture
from compiler.diagnostics import PlanError
from compiler.ir.text import parse_graph, print_graph
from compiler.ir.verify import verify_graph
from runtime.factory import build
from runtime.opaque import call_opaque
from tests.capture.support import float64, gradients, request_of, run_eager, run_graph


class Router(nn.Module):
    """Looks at values: each sample goes through one of two layers."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, factor=1.0, *, both=None):
        rows = [self.left(row) if row.sum().item() > 0 else self.right(row) for row in x]
        y = torch.stack(rows) * factor
        return (y, y.sum(-1)) if both else y


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Rounded(nn.Module):
    def forward(self, x):
        return {"value": Round.apply(x), "kind": "rounded", "more": [x * 2, None]}


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("now", torch.arange(4.0))
        self.register_buffer("before", torch.zeros(4))

    def forward(self, x):
        self.before, self.now = self.now, 0.9 * self.now + x.detach().mean(0)
        return self.norm(x) - self.now * self.before


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.router = Router()
        self.round = Rounded()
        self.average = Averaged()

    def forward(self, x, y):
        h = self.router(self.first(x), factor=2.0)
        h, total = self.router(h, both={"a": [h]})
        rounded = self.round(h)
        h = self.average(rounded["value"] + rounded["more"][0])
        return F.mse_loss(h, y) + total.mean()


def build_model():
    return Model()


FACTORY = "tests.capture.test_opaque:build_model"
PATTERNS = ("router", "round", "average")


def batch(rows=5):
    g = torch.Generator().manual_seed(0)
    return {"x": torch.randn(rows, 4, generator=g), "y": torch.randn(rows, 4, generator=g)}


def run_opaque(model):
    def run(node, args):
        path, inputs, state, call = args
        return call_opaque(model.get_submodule(path), call, (*inputs, *state))

    return run


def test_equals_eager_with_gradients_and_buffers():
    with float64():
        captured = capture(request_of(FACTORY, batch(), opaque=PATTERNS, dtype="float64"))
        verify_graph(captured.graph)
        torch.manual_seed(0)
        model = build(FACTORY, {})
        found = run_graph(captured, model, batch(), opaque=run_opaque(model))
        mine = gradients(found["loss"], model)
        expected = run_eager(model, batch())
        theirs = gradients(expected["loss"], model)
        assert [role for role in found if role.startswith("buffer:")] == [
            "buffer:average.now", "buffer:average.before", "buffer:average.norm.running_mean",
            "buffer:average.norm.running_var", "buffer:average.norm.num_batches_tracked",
        ]  # fmt: skip
        for role, value in found.items():
            torch.testing.assert_close(value, expected[role], msg=role)
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name], gradient, msg=name)


def test_graph():
    captured = capture(request_of(FACTORY, batch(), opaque=PATTERNS))
    calls = [node for node in captured.graph.nodes if node.op == "planc.opaque"]
    assert [node.args[0] for node in calls] == ["router", "router", "round", "average"]
    assert [value.name for value in calls[0].args[2]] == [
        "router.left.weight", "router.left.bias", "router.right.weight", "router.right.bias",
    ]  # fmt: skip
    assert [out.shape for out in calls[1].outputs] == [(5, 4), (5,)]
    assert all(out.differentiable for out in calls[0].outputs)
    assert calls[0].origin.module == "router"
    text = print_graph(captured.graph)
    assert print_graph(parse_graph(text)) == text


def test_only_opaque_modules_are_replaced_and_only_while_tracing():
    with pytest.raises(PlanError, match="E122"):
        capture(request_of(FACTORY, batch(), opaque=("round", "average")))
    assert Router.forward.__qualname__ == "Router.forward"


class Counts(nn.Module):
    """An opaque module keeps what it likes, and holds its weights in a list too."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(4, 4, batch_first=True)
        self.inner.register_forward_pre_hook(self.count)
        self.inner.calls = []

    def count(self, module, inputs):
        module.calls.append(len(module.calls))

    def forward(self, x, y):
        return F.mse_loss(self.inner(x[:, None])[0][:, 0], y)


def test_what_an_opaque_module_keeps():
    assert capture(request_of("tests.capture.test_opaque:Counts", batch(), opaque=("inner",))).notes == []


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Router()

    def forward(self, x, y):
        return F.mse_loss(self.inner(x, factor=object()), y)


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Uneven()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, y):
        return self.inner(x).sum() * self.scale


class Uneven(nn.Module):
    def forward(self, x):
        return x[: int(x.shape[0] + (x.sum() * 0).item()) - 1]


@pytest.mark.parametrize("name, message", [("Fails", "a object is passed to it"), ("Grows", "1 rows for 2 samples")])
def test_refused(name, message):
    with pytest.raises(PlanError) as caught:
        capture(request_of(f"tests.capture.test_opaque:{name}", batch(), opaque=("inner",)))
    assert "E128" in str(caught.value) and message in str(caught.value)
