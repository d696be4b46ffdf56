"""The zoo's models are sound before any compiler touches them."""
import pytest
import torch
from torch import nn

from tests.zoo import IGNORED, TRAITS, ZOO, ZooModel, get, literal, loss_of, plan_text, select

every_model = pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
pytestmark = pytest.mark.usefixtures("float64")


def step(entry: ZooModel, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """A model after one forward and backward."""
    model = entry.build(seed)
    loss = loss_of(model(**entry.batch(8)))
    loss.backward()
    return model, loss.detach()


@every_model
def test_builds_on_meta_with_the_same_parameters_and_buffers(entry):
    with torch.device("meta"):
        meta = entry.build()
    real = entry.build()

    def described(model):
        state = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        return {name: (tuple(value.shape), value.dtype, value.requires_grad) for name, value in state}

    assert described(meta) == described(real)
    assert all(value.is_meta for value in meta.parameters())


@every_model
def test_loss_is_a_finite_scalar(entry):
    _, loss = step(entry)
    assert loss.shape == () and loss.isfinite()


@every_model
def test_gradients_reach_what_learns_and_nothing_else(entry):
    model, _ = step(entry)
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert bool(missing) == bool(entry.traits & {"unused", "branch"}), missing
    assert bool(frozen) == ("frozen" in entry.traits), frozen
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@every_model
def test_equal_seeds_give_equal_results_to_the_bit(entry):
    (one, loss), (two, again) = step(entry), step(entry)
    assert torch.equal(loss, again)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q)
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


@every_model
def test_batches_fit_the_declared_inputs(entry):
    for n in (2, 5):
        batch = entry.batch(n)
        assert {name: tuple(value.shape) for name, value in batch.items()} == entry.shapes(n)
        for name, (dtype, _) in entry.inputs.items():
            declared = torch.get_default_dtype() if dtype == "float32" else getattr(torch, dtype)
            assert batch[name].dtype == declared


@every_model
def test_the_seed_changes_the_batch(entry):
    first, second = entry.batch(4, seed=0), entry.batch(4, seed=1)
    assert any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "entry", [entry for entry in ZOO if entry.factory.startswith("dsl_examples")], ids=lambda entry: entry.name
)
def test_reset_parameters_initialises_a_model_built_on_meta(entry):
    with torch.device("meta"):
        model = entry.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    left = [name for name, p in model.named_parameters() if p.isnan().any()]
    assert not left


@every_model
def test_dropout_is_declared(entry):
    model, batch = entry.build(), entry.batch(8)
    before = torch.get_rng_state()
    model(**batch)
    assert torch.equal(before, torch.get_rng_state()) != ("dropout" in entry.traits)


@every_model
def test_metrics_are_declared(entry):
    output = entry.build()(**entry.batch(4))
    assert isinstance(output, torch.Tensor) != ("metrics" in entry.traits)


def test_labels_are_uneven_over_the_rows():
    counts = (get("llama-tiny").batch(4)["labels"] != IGNORED).sum(1).tolist()
    assert counts == [2, 5, 8, 0]


def test_select_filters_by_size_and_traits():
    assert {entry.size for entry in select(size="small")} == {"small"}
    assert all("dropout" in entry.traits for entry in select(dropout=True))
    assert not {entry.name for entry in select(dropout=False)} & {entry.name for entry in select(dropout=True)}
    assert all(entry.traits <= TRAITS.keys() for entry in ZOO)
    with pytest.raises(AssertionError, match="no such trait: dropuot"):
        select(dropuot=True)


def test_plan_text_of_an_own_model():
    assert plan_text(get("llama-tiny"), batch=12, mesh="dp=3", microbatches=2, extra="clip grad_norm = 1.0") == """\
model "dsl_examples.models.llama:Llama" { layers = 2, dim = 16, heads = 4, kv_heads = 2, vocab = 32, context = 16 }
batch = 12
seq = 8
input tokens : int64[batch, seq]
input labels : int64[batch, seq]
mesh dp=3
data over dp { microbatches = 2 }
optimizer adamw { lr = 1e-3, betas = (0.9, 0.95), weight_decay = 0.1 }
clip grad_norm = 1.0
"""


def test_plan_text_writes_lengths_that_differ_as_numbers():
    text = plan_text(get("encdec-tiny"), mesh="dp=2")
    assert "input source : int64[batch, 7]" in text and "input target : int64[batch, 5]" in text
    assert "seq" not in text and "\ndata over dp\n" in text
    assert "input images : float32[batch, 3, 8, 8]" in plan_text(get("vit-tiny"))


def test_literals():
    values = (True, None, 3, 1e-5, "sdpa", (2, 2), ("wq", "wv"))
    assert [literal(value) for value in values] == ["on", "none", "3", "1e-05", '"sdpa"', "(2, 2)", '("wq", "wv")']
