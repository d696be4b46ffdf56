"""What tracing could get wrong: gradients switched off, mutation, ties, constants, checkpointing. Equal to eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from compiler.capture import capture
from runtime.factory import build
from tests.capture.support import assert_same_program, float64, request_of, run_eager, run_graph


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


# -- gradients switched off ---------------------------------------------------------------------------------------------


class NoGrad(Base):
    def forward(self, x, y):
        with torch.no_grad():
            target = self.a(x)
            flat = target.view(-1)
        return F.mse_loss(self.b(x) + target + flat.view_as(target), y)


class NoGradAlias(Base):
    """A view made without gradients has none; a name given there is the tensor itself."""

    def forward(self, x, y):
        h = self.a(x)
        with torch.no_grad():
            view, same = h.view(-1), h
        return F.mse_loss(self.b(x) + view.view_as(h) * same, y)


class NoGradDecorated(Base):
    @torch.no_grad()
    def target(self, x):
        return self.a(x).softmax(-1)

    def forward(self, x, y):
        return F.mse_loss(self.b(x), self.target(x)) + y.mean()


class GradInsideNoGrad(Base):
    def forward(self, x, y):
        with torch.no_grad():
            still = self.a(x)
            with torch.enable_grad():
                learning = self.b(x)
        return F.mse_loss(learning + still, y)


class SwitchedByHand(Base):
    def forward(self, x, y):
        torch.set_grad_enabled(False)
        h = self.a(x)
        torch.set_grad_enabled(True)
        return F.mse_loss(self.b(h), y)


class Detached(Base):
    def forward(self, x, y):
        return F.mse_loss(self.b(x) + self.a(x).detach() + self.a(x).data, y)


class StraightThrough(Base):
    def forward(self, x, y):
        h = self.a(x)
        return F.mse_loss(h + (h.round() - h).detach(), y)


class SpectralNorm(Base):
    """Power iteration without gradients on buffers, through a parametrization."""

    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(self.a)
        self.b = nn.utils.parametrizations.spectral_norm(self.b)

    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x)), y)


class Checkpointed(Base):
    def forward(self, x, y):
        h = checkpoint(lambda v: F.relu(self.a(v)), x, use_reentrant=False)
        return F.mse_loss(self.b(h), y)


class CheckpointedReentrant(Base):
    def forward(self, x, y):
        h = checkpoint(lambda v: F.relu(self.a(v)), self.b(x), use_reentrant=True)
        return F.mse_loss(h, y)


# -- mutation ----------------------------------------------------------------------------------------------------------


class BufferAssigned(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x, y):
        h = self.b(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return F.mse_loss(h * self.mean, y)


class BufferChangedTwice(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x, y):
        h = self.b(x)
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        self.mean.copy_(self.mean + 1)
        return F.mse_loss(h * self.mean.clone(), y)


class BufferIsAnInput(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(8, 4))

    def forward(self, x, y):
        self.last.copy_(x)
        return F.mse_loss(self.b(x), y)


class Two(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("now", torch.arange(4.0))
        self.register_buffer("before", torch.ones(4))
        self.register_buffer("count", torch.zeros(()))


class BuffersInTurn(Two):
    """One buffer is given the old tensor of another, which is assigned itself."""

    def forward(self, x, y):
        h = self.b(x)
        self.before = self.now
        self.now = h.detach().mean(0)
        return F.mse_loss(h * self.before + self.now, y)


class BuffersExchanged(Two):
    def forward(self, x, y):
        self.now, self.before = self.before, self.now
        return F.mse_loss(self.b(x) * self.before + self.now, y)


class ViewsOfBuffers(Two):
    """A view of an old buffer is assigned and written into."""

    def forward(self, x, y):
        old, self.now = self.now, self.now + 1
        self.before = old[:]
        self.before += x.mean(0)
        return F.mse_loss(self.b(x) * self.before + self.now, y)


class OldBufferReturned(Two):
    """A metric is the buffer as it was."""

    def forward(self, x, y):
        old = self.count
        self.count = self.count + 1
        return {"loss": F.mse_loss(self.b(x), y), "old": old, "new": self.count}


class PlainTensorAssigned(Base):
    """A plain attribute is a buffer too: it has a state that the next step sees."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, x, y):
        h = self.b(x)
        self.mean = self.mean + h.detach().mean(0)
        return F.mse_loss(h * self.mean, y)


class InputChanged(Base):
    def forward(self, x, y):
        x += 1
        y[:, 0] = 0
        return F.mse_loss(self.b(x), y)


# -- the rest ----------------------------------------------------------------------------------------------------------


class Constants(Base):
    def forward(self, x, y):
        scale, columns, half = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 2]), torch.tensor(0.5)
        return F.mse_loss((self.b(x) * scale * half)[:, columns], y[:, columns])


class ScalarIndex(Base):
    def forward(self, x, y):
        which = torch.tensor(2)
        return F.mse_loss(self.b(x)[which], y[x[:, 0].argmax()])


class Tied(Base):
    def __init__(self):
        super().__init__()
        self.b.weight = self.a.weight
        self.again = self.a

    def forward(self, x, y):
        return F.mse_loss(self.again(self.b(self.a(x))), y)


class ForwardHook(Base):
    def __init__(self):
        super().__init__()
        self.a.register_forward_hook(lambda module, inputs, output: output * 2)

    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x)), y)


class ReadsValuesWhenBuilt(Base):
    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]

    def forward(self, x, y):
        return F.mse_loss(self.b(x) * self.rates[1], y)


class Vmapped(Base):
    def forward(self, x, y):
        return F.mse_loss(torch.vmap(lambda row: self.b(row) * row.sum())(x), y)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.cell = nn.LSTM(4, 4, batch_first=True), nn.GRUCell(4, 4)

    def forward(self, x, y):
        h, _ = self.lstm(x[:, None].expand(-1, 3, -1))
        return F.mse_loss(self.cell(h[:, -1]), y)


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x, y):
        x = x[:, None] * torch.arange(1.0, 4)[:, None]
        h, weights = self.attend(x, x, x)
        return F.mse_loss(self.layer(h)[:, 0], y) + weights.square().mean()


class OneElement(Base):
    """A loss of shape [1], which `backward` takes as well."""

    def forward(self, x, y):
        return F.mse_loss(self.a(x), y).view(1)


MODELS = [item for item in vars().values() if isinstance(item, type) and issubclass(item, nn.Module) and item not in (Base, Two)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_equals_eager(model):
    factory = f"tests.capture.test_semantics:{model.__name__}"
    with float64():
        g = torch.Generator().manual_seed(0)
        batch = {"x": torch.randn(8, 4, generator=g), "y": torch.randn(8, 4, generator=g)}
        captured = capture(request_of(factory, batch, dtype="float64"))
        torch.manual_seed(0)
        assert_same_program(captured, build(factory, {}).double(), batch)


def captured_of(model, **more):
    batch = {"x": torch.zeros(8, 4), "y": torch.zeros(8, 4)}
    return capture(request_of(f"tests.capture.test_semantics:{model.__name__}", batch, **more))


def test_ties():
    captured = captured_of(Tied)
    assert captured.ties == {"b.weight": "a.weight", "again.weight": "a.weight", "again.bias": "a.bias"}
    assert [v.name for v in captured.graph.inputs if v.kind == "param"] == ["a.weight", "a.bias", "b.bias"]


def test_frozen_and_unused():
    captured = captured_of(NoGrad, freeze=("b.weight",))
    assert {name: (p.requires_grad, p.used) for name, p in captured.parameters.items()} == {
        "a.weight": (True, True), "a.bias": (True, True), "b.weight": (False, True), "b.bias": (True, True),
    }  # fmt: skip
    assert not captured_of(OneElement).parameters["b.weight"].used


def test_buffers():
    info = captured_of(PlainTensorAssigned).buffers["mean"]
    assert (info.shape, info.dtype, info.persistent, info.mutated) == ((4,), "float32", False, True)


def test_dtype_of_a_lower_precision():
    captured = captured_of(BufferAssigned, dtype="bfloat16")
    assert {value.dtype for value in captured.graph.inputs} == {"bfloat16"}
    assert captured.graph.outputs["loss"].dtype == "bfloat16"


class Mixed(Base):
    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x)
            with torch.autocast("cpu", enabled=False):
                k = self.b(h.float())
            z = h.softmax(-1) @ k.t()
        return F.mse_loss(h.float() + k, y) + z.sum()


def test_autocast():
    """Casts are written out, and give eager's numbers to the bit."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
    factory = "tests.capture.test_semantics:Mixed"
    model = build(factory, {})
    assert torch.equal(run_graph(capture(request_of(factory, batch)), model, batch)["loss"], model(**batch))


class Cached(Base):
    """A table made at the first call, in three ways to keep it, and a counter that is not used."""

    def __init__(self):
        super().__init__()
        self.table = None
        self.register_buffer("other", None)
        self.calls = 0

    def forward(self, x, y):
        if self.table is None:
            self.table = torch.arange(4.0)
            self.other = torch.arange(4.0) + 1
            self.third = torch.arange(4.0) + 2
        self.calls += 1
        return F.mse_loss(self.a(x) * self.table * self.other * self.third, y)


def test_caches_are_noted_and_computed_anew():
    with float64():
        factory = "tests.capture.test_semantics:Cached"
        batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
        captured = capture(request_of(factory, batch, dtype="float64"))
        assert_same_program(captured, build(factory, {}), batch)
        kept = [f"the forward keeps a tensor in `{name}` for its next call" for name in ("other", "table", "third")]
        assert [note.partition(":")[0] for note in captured.notes] == [*kept[:2], "the forward changes `calls`", kept[2]]


class Kept(Base):
    """What is kept, but read in the same call only."""

    def __init__(self):
        super().__init__()
        self._seen, self.weights, self.tables = [], None, {"rotary": {}}
        self.register_buffer("rate", torch.arange(4.0))

    def forward(self, x, y):
        if x.shape[1] not in self.tables["rotary"]:
            self.tables["rotary"][x.shape[1]] = self.rate.cos()
        self.weights = self.a(x)
        self._seen = [*self._seen, self.weights]
        return F.mse_loss(self._seen[-1] * self.tables["rotary"][x.shape[1]], y) + self.weights.mean()


def test_a_list_of_the_weights_keeps_nothing():
    assert captured_of(Recurrent).notes == []


def test_what_later_calls_do_not_read_may_be_kept():
    with float64():
        factory = "tests.capture.test_semantics:Kept"
        batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
        captured = capture(request_of(factory, batch, dtype="float64"))
        torch.manual_seed(0)
        assert_same_program(captured, build(factory, {}), batch)
        assert [note.split("`")[1] for note in captured.notes] == ["_seen", "weights", "tables"]


class Outputs(Base):
    def forward(self, x):
        h = self.a(x)
        return {"logits": h, "hidden": (x, [self.b(h)]), "size": 3}


def test_programs_that_only_go_forward():
    batch = {"x": torch.randn(8, 4)}
    factory = "tests.capture.test_semantics:Outputs"
    captured = capture(request_of(factory, batch, keep_outputs=True, train=False))
    assert list(captured.graph.outputs) == ["output:logits", "output:hidden.0", "output:hidden.1.0"]
    model = build(factory, {})
    found = run_graph(captured, model, batch)
    assert torch.equal(found["output:hidden.1.0"], model(batch["x"])["hidden"][1][0])


def test_metrics_and_notes():
    from tests.zoo import get

    entry = get("vit-tiny")
    captured = capture(request_of(entry.factory, entry.batch(4), options=entry.options))
    assert list(captured.graph.outputs) == ["loss", "metric:accuracy"]
    assert not captured.graph.outputs["metric:accuracy"].differentiable
    entry = get("c43_inplace")
    assert list(run_eager(build(entry.factory, {}), entry.batch(4))) == ["loss"]
