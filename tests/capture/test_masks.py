"""Masks that depend on no input are recognised by what they evaluate to."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compiler.capture import capture
from compiler.capture.normalize import masks
from runtime.factory import build
from tests.capture.support import assert_same_program, float64, request_of
from tests.zoo import get

B, H, S = 2, 2, 6


def tril():
    return torch.ones(S, S, dtype=torch.bool).tril()


def by_arange():
    at = torch.arange(S)
    return at[:, None] >= at[None, :]


def batched():
    """As transformers libraries do: an index for each of batch, head, query and key."""
    b, h, q, k = torch.arange(B), torch.arange(1), torch.arange(S), torch.arange(S)
    documents = torch.cumsum(torch.zeros(B, S, dtype=torch.long), -1)
    same = documents[b[:, None, None, None], q[:, None]] == documents[b[:, None, None, None], k]
    return (k <= q[:, None]) & same & (h[:, None, None] >= 0)


def by_vmap():
    step = torch.arange(S)
    return torch.vmap(torch.vmap(lambda q, k: k <= q, in_dims=(None, 0)), in_dims=(0, None))(step, step)


def additive():
    return torch.full((S, S), float("-inf")).triu(1)


def additive_lowest():
    return torch.zeros(1, 1, S, S).masked_fill(~tril(), torch.finfo(torch.float64).min)


def additive_float32():
    return torch.zeros(S, S).masked_fill(~tril(), torch.finfo(torch.float32).min)


def written():
    mask = torch.zeros(S, S, dtype=torch.bool)
    for k in range(S):
        mask[k, : k + 1] = True
    return mask


def window():
    return tril() & ~torch.ones(S, S, dtype=torch.bool).tril(-3)


CASES = {
    # mask: (whether it becomes causal, or None if the mask stays; the window)
    "tril": (tril, True),
    "by_arange": (by_arange, True),
    "batched": (batched, True),
    "by_vmap": (by_vmap, True),
    "additive": (additive, True),
    "additive_lowest": (additive_lowest, True),
    "additive_float32": (additive_float32, True),
    "written": (written, True),
    "expanded": (lambda: tril().expand(B, H, S, S), True),
    "constant_tensor": (lambda: torch.tensor([[k <= q for k in range(S)] for q in range(S)]), True),
    "ones": (lambda: torch.ones(S, S, dtype=torch.bool), False),
    "ones_row": (lambda: torch.ones(1, S, dtype=torch.bool), False),
    "zeros": (lambda: torch.zeros(S, S), False),
    "window": (window, True, 3),
    "window_of_one": (lambda: torch.eye(S, dtype=torch.bool), True, 1),
    "first_column": (lambda: (torch.arange(S) < 1).expand(S, S), None),
    "window_cut": (lambda: window() | (torch.arange(S)[:, None] == 5), None),
    "strict": (lambda: torch.ones(S, S, dtype=torch.bool).tril(1), None),
    "reversed": (lambda: tril().flip(0), None),
    "bias": (lambda: -torch.arange(S).double() * tril(), None),
    "nothing_allowed": (lambda: torch.zeros(S, S, dtype=torch.bool), None),
    "differs_by_head": (lambda: torch.stack([tril(), tril().flip(0)]), None),
}


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.mask = CASES[name][0]
        self.qkv = nn.Linear(4, 3 * 4)

    def forward(self, x):
        q, k, v = self.qkv(x).view(B, S, 3, H, 2).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask()).square().sum()


@pytest.mark.parametrize("small", [masks.SMALL, B * S], ids=["whole", "rows"])
@pytest.mark.parametrize("name", CASES)
def test_mask(name, small, monkeypatch):
    monkeypatch.setattr(masks, "SMALL", small)
    with float64():
        batch = {"x": torch.randn(B, S, 4)}
        factory = "tests.capture.test_masks:Model"
        captured = capture(request_of(factory, batch, options={"name": name}, dtype="float64"))
        assert_same_program(captured, build(factory, {"name": name}), batch)
    (node,) = (n for n in captured.graph.nodes if n.op == "planc.attention")
    expected, window = (*CASES[name][1:], None)[:2]
    if small > S * S or not expected or name in ("by_arange", "tril", "batched", "additive"):
        assert (node.args[3] is None, node.args[4]) == (expected is not None, bool(expected))
        assert dict(enumerate(node.args)).get(8) == window


@pytest.mark.parametrize("shape", ["b q k", "b 1 q k"])
def test_documents(shape):
    """Documents are an operand of attention; any other condition keeps the mask."""
    captured = capture(request_of("tests.capture.test_masks:Packed", packed(), options={"shape": shape}))
    (node,) = (n for n in captured.graph.nodes if n.op == "planc.attention")
    assert (node.args[3], node.args[4], node.args[8], node.args[9].name) == (None, True, None, "documents")
    captured = capture(request_of("tests.capture.test_masks:Packed", packed(), options={"shape": shape, "more": True}))
    (node,) = (n for n in captured.graph.nodes if n.op == "planc.attention")
    assert node.args[3] is not None and len(node.args) == 8


def packed():
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    return {"x": torch.randn(B, S, 4), "documents": documents}


class Packed(Model):
    def __init__(self, shape, more=False):
        super().__init__("tril")
        self.shape, self.more = shape, more

    def forward(self, x, documents):
        q, k, v = self.qkv(x).view(B, S, 3, H, 2).permute(2, 0, 3, 1, 4)
        mask = documents[:, :, None] == documents[:, None, :]
        mask = mask[:, None] & self.mask() if self.shape == "b 1 q k" else (mask & self.mask())[:, None]
        if self.more:
            mask = mask & (x.sum(-1) > 0)[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().sum()


@pytest.mark.parametrize("name", ["hf-llama", "hf-qwen3", "hf-gpt2", "hf-gpt2-dropout"])
def test_hugging_face_masks_are_causal(name):
    entry = get(name)
    captured = capture(request_of(entry.factory, entry.batch(4), options=entry.options))
    calls = [n for n in captured.graph.nodes if n.op == "planc.attention"]
    assert calls and all(n.args[3] is None and n.args[4] is True for n in calls)
    assert not [n for n in captured.graph.nodes if n.op.startswith(("aten.le", "aten.cumsum", "aten.bitwise_and"))]


def test_long_masks_are_cheap():
    """Billions of elements in the batch dimensions, and a large square, are neither held nor computed."""
    pytest.importorskip("transformers")
    options = dict(
        config="LlamaConfig", vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=4096,
    )  # fmt: skip
    inputs = {name: torch.empty(4096, 4096, dtype=torch.long) for name in ("input_ids", "labels")}
    captured = capture(request_of("transformers:AutoModelForCausalLM.from_config", inputs, options=options))
    (node,) = (n for n in captured.graph.nodes if n.op == "planc.attention")
    assert (node.args[3], node.args[4]) == (None, True)


@pytest.mark.parametrize("window", [None, 4096])
def test_a_million_positions(window):
    """A mask that compares positions is known from its first and its last row."""
    inputs = {"x": torch.empty(1, 1 << 20, 4)}
    captured = capture(request_of("tests.capture.test_masks:Long", inputs, options={"window": window}))
    (node,) = (n for n in captured.graph.nodes if n.op == "planc.attention")
    assert (node.args[3], node.args[4], dict(enumerate(node.args)).get(8)) == (None, True, window)


class Long(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.window = window
        self.qkv = nn.Linear(4, 3 * 4)

    def forward(self, x):
        at = torch.arange(x.shape[1])
        mask = at <= at[:, None]
        if self.window is not None:
            mask = mask & (at[:, None] - at < self.window)
        q, k, v = self.qkv(x).view(1, x.shape[1], 3, H, 2).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None].expand(1, H, -1, -1)).square().sum()
