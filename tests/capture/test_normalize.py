"""Each spelling becomes the normal form, and computes what it did before.

A case is a function of x: float64[4, 6] (it depends on a parameter), and the operators that it must become, without
the `mul` that makes x and the `mul`, `sum` that make a loss.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compiler.capture import capture
from compiler.ir.verify import verify_graph
from runtime.factory import build
from tests.capture.support import assert_same_program, float64, request_of

VIEW, PERMUTE, EXPAND, SLICE, SELECT = "view", "permute", "expand", "slice", "select"

CASES = {
    # reshapes
    "view": (lambda x: x.view(2, 2, -1), VIEW),
    "reshape": (lambda x: x.reshape(-1), VIEW),
    "reshape_of_permuted": (lambda x: x.t().reshape(3, 8), "permute view"),
    "flatten": (lambda x: x.view(2, 2, 6).flatten(1).flatten(), "view view view"),
    "unflatten": (lambda x: x.unflatten(-1, (2, 3)), VIEW),
    "squeeze": (lambda x: x.unsqueeze(-1).squeeze(), ""),
    "squeeze_dims": (lambda x: x[None, :, None].squeeze((0, 2)), ""),
    "view_as": (lambda x: x.view_as(torch.empty(6, 4)), VIEW),
    "ravel": (lambda x: x.ravel(), VIEW),
    "identity_views": (lambda x: x.view(4, 6).reshape(4, -1).flatten(1).squeeze(0), ""),
    "there_and_back": (lambda x: x.flatten().view(2, 12).view(4, 6) * 2, "mul"),
    "none_index": (lambda x: x[:, None], VIEW),
    # copies that change nothing
    "clone": (lambda x: x.clone().contiguous(), ""),
    "to_same": (lambda x: x.to(torch.float64).double().to("cpu").to(x), ""),
    "positive": (lambda x: +x, ""),
    "contiguous_of_permuted": (lambda x: x.t().contiguous(), PERMUTE),
    # the order of dimensions
    "t": (lambda x: x.t(), PERMUTE),
    "transpose": (lambda x: x.transpose(-1, -2), PERMUTE),
    "permute": (lambda x: x.view(2, 2, 6).permute(2, 0, -2), "view permute"),
    "identity_permute": (lambda x: x.permute(0, 1).transpose(1, 1), ""),
    "movedim": (lambda x: x.view(2, 2, 6).movedim(0, -1), "view permute"),
    "swapaxes": (lambda x: x.swapaxes(0, 1), PERMUTE),
    "mT": (lambda x: x.mT, PERMUTE),
    "numpy_T": (lambda x: x.T, PERMUTE),
    # broadcasts and repetitions
    "expand": (lambda x: x.unsqueeze(1).expand(-1, 3, 6), "view expand"),
    "expand_front": (lambda x: x.expand(2, 4, 6), EXPAND),
    "expand_as": (lambda x: x[:1].expand_as(torch.empty(3, 6)), "slice expand"),
    "expand_same": (lambda x: x.expand(4, -1), ""),
    "broadcast_to": (lambda x: torch.broadcast_to(x, (2, 4, 6)), EXPAND),
    "broadcast_tensors": (lambda x: torch.broadcast_tensors(x, x[:1])[1], "slice expand"),
    "repeat": (lambda x: x.repeat(2, 1, 3), "view expand view"),
    "repeat_once": (lambda x: x.repeat(1, 1), ""),
    "tile": (lambda x: x.tile(2), "view expand view"),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, dim=-1), "view expand view"),
    "repeat_interleave_flat": (lambda x: x.repeat_interleave(2), "view view expand view"),
    "meshgrid": (lambda x: sum(torch.meshgrid(x[0], x[:, 0], indexing="ij")), None),
    "meshgrid_xy": (lambda x: sum(torch.meshgrid(x[0], x[:, 0], indexing="xy")), None),
    # parts
    "slice": (lambda x: x[:, 2:-1], SLICE),
    "slice_all": (lambda x: x[:, :], ""),
    "slice_step": (lambda x: x[:, 1::2], SLICE),
    "slice_beyond": (lambda x: x[1:100], SLICE),
    "slice_empty": (lambda x: x[:, 5:2].sum() + x, None),
    "narrow": (lambda x: x.narrow(1, -3, 2), SLICE),
    "select": (lambda x: x[-1], SELECT),
    "select_all": (lambda x: x[..., 0], SELECT),
    "split": (lambda x: x.split(4, dim=-1)[1], SLICE),
    "split_sizes": (lambda x: x.split([1, 2, 3], -1)[2], SLICE),
    "split_whole": (lambda x: x.split(9)[0], ""),
    "split_all": (lambda x: sum(p.sum() for p in x.split(4, -1)), None),
    "chunk": (lambda x: x.chunk(4, dim=1)[2], SLICE),
    "tensor_split": (lambda x: x.tensor_split(4, dim=1)[3], SLICE),
    "tensor_split_at": (lambda x: x.tensor_split((1, -2), dim=1)[1], SLICE),
    "unbind": (lambda x: x.unbind(-1)[4], SELECT),
    "iterate": (lambda x: sum(row * k for k, row in enumerate(x)), None),
    "pad": (lambda x: F.pad(x, (1, 2)), "constant_pad_nd"),
    "pad_value": (lambda x: F.pad(x, (0, 0, 1, 0), value=2.5), "constant_pad_nd"),
    "pad_nothing": (lambda x: F.pad(x, (0, 0)), ""),
    "pad_crop": (lambda x: F.pad(x, (-1, 1)), "constant_pad_nd"),
    # dtypes
    "cast": (lambda x: x.to(torch.int64) * x, "cast mul"),
    "type_as": (lambda x: (x > 0).type_as(x) * x, None),
    "bool_mean": (lambda x: x * (x > 0).double().mean(), None),
    "rrelu": (lambda x: F.rrelu(x, 0.1, 0.4), "leaky_relu"),
    "rsub": (lambda x: torch.rsub(x, x * 2, alpha=3), "mul sub"),
    "rsub_scalar": (lambda x: 1 - x, "rsub"),
    # made of nothing
    "ones_like": (lambda x: x + torch.ones_like(x), "full add"),
    "zeros_like": (lambda x: x + torch.zeros_like(x, dtype=torch.float32), "full add"),
    "new_full": (lambda x: x + x.new_full((6,), 2.5), "full add"),
    "new_zeros": (lambda x: x + x.new_zeros(1), "full add"),
    "full_like": (lambda x: x * torch.full_like(x, 3), "full mul"),
    "empty_filled": (lambda x: x + torch.empty(6).fill_(2), "full add"),
    "arange": (lambda x: x * torch.arange(6), "arange mul"),
    "arange_float": (lambda x: x * torch.arange(0, 3, 0.5), "arange mul"),
    "arange_range": (lambda x: x * torch.arange(1, 7), "arange mul"),
    "scalar_tensor": (lambda x: x * torch.scalar_tensor(2.0), "full mul"),
    "eye": (lambda x: x @ torch.eye(6), "eye matmul"),
    "tril": (lambda x: x @ torch.ones(6, 6).tril(), "full tril matmul"),
    "linspace": (lambda x: x * torch.linspace(0, 1, 6), "linspace mul"),
    "constant_tensor": (lambda x: x * torch.tensor([1.0, 2, 3, 4, 5, 6]), "mul"),
    # in place
    "copy_": (lambda x: torch.zeros(4, 6).copy_(x[:1]), "slice expand"),
    "copy_cast": (lambda x: torch.zeros(4, 6, dtype=torch.float32).copy_(x), ""),
    "assign_slice": (lambda x: _assigned(x, (slice(None), slice(1, 3)), 2.0), None),
    "assign_row": (lambda x: _assigned(x, 1, x.detach()[0]), None),
    "masked_fill_": (lambda x: (x * 1).masked_fill_(x > 0, 0.5), None),
    "index_put": (lambda x: _assigned(x, torch.tensor([0, 2]), 1.0), None),
    "zero_": (lambda x: x + (x * 2).zero_(), "full add"),
    "through_a_view": (lambda x: _through_view(x), None),
    "relu_": (lambda x: F.relu_(x * 1), "relu"),
    # dimensions count from the front
    "sum": (lambda x: x.sum(-1), "sum"),
    "softmax": (lambda x: x.softmax(-1), "softmax"),
    "cat": (lambda x: torch.cat([x, x * 2], -1), "mul cat"),
    "stack": (lambda x: torch.stack([x, x], -1), "stack"),
    "gather": (lambda x: x.gather(-1, (x > 0).long()), None),
    "cumsum": (lambda x: x.cumsum(-2), "cumsum"),
    "argmax": (lambda x: x * x.argmax(-1, keepdim=True), None),
    "flip": (lambda x: x.flip(-1), "flip"),
    "roll": (lambda x: x.roll(1, -1), "roll"),
    "topk": (lambda x: x.topk(2, -1)[0], "topk"),
    "max_dim": (lambda x: x.max(-1).values, "max"),
    "layer_norm": (lambda x: F.layer_norm(x, (6,)), "layer_norm"),
    "detach": (lambda x: x * x.detach(), "detach mul"),
    "einsum": (lambda x: torch.einsum("ij,kj->ik", x, x), None),
    # dropout: the mask itself is compared in test_dropout
    "dropout_zero": (lambda x: F.dropout(x, 0.0), ""),
    "dropout_eval": (lambda x: F.dropout(x, 0.5, training=False), ""),
    "dropout_one": (lambda x: F.dropout(x, 1.0) + x, "mul add"),
    "feature_dropout_eval": (lambda x: F.dropout1d(x, 0.5, training=False), ""),
    "alpha_dropout_eval": (lambda x: F.alpha_dropout(x, 0.5, training=False), ""),
}


def _assigned(x, at, value):
    y = x * 1
    y[at] = value
    return y


def _through_view(x):
    y = x * 1
    y.view(2, 2, 6)[0].mul_(3)
    return y


class Case(nn.Module):
    """Runs one case."""

    def __init__(self, name):
        super().__init__()
        self.function = CASES[name][0]
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        y = self.function(x * self.weight)
        return (y * torch.arange(1, y.numel() + 1).reshape(y.shape)).sum()


FACTORY = "tests.capture.test_normalize:Case"


def operators(graph):
    """Short names of the operators between the first `mul` and the loss."""
    names = [node.op.split(".")[1] for node in graph.nodes]
    assert names[0] == "mul" and names[-1] == "sum"
    names = names[1:-1]
    names.reverse()
    flat = len(graph.nodes[-1].args[0].shape) == 1
    for part in ("mul", "arange") if flat else ("mul", "view", "arange"):  # what weighs the result
        names.remove(part)
    return " ".join(reversed(names))


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    with float64():
        batch = {"x": torch.randn(4, 6)}
        captured = capture(request_of(FACTORY, batch, options={"name": name}, dtype="float64"))
        verify_graph(captured.graph)
        torch.manual_seed(0)
        model = build(FACTORY, {"name": name})
        assert_same_program(captured, model, batch)
        expected = CASES[name][1]
        if expected is not None:
            found = operators(captured.graph)
            assert sorted(found.split()) == sorted(expected.split()), found
        check_normal_form(captured.graph)


GONE = """
    unsqueeze squeeze flatten unflatten reshape _unsafe_view t transpose swapaxes movedim clone contiguous alias to
    _to_copy split chunk unbind split_with_sizes repeat repeat_interleave expand_as broadcast_tensors ones zeros
    ones_like zeros_like full_like new_full new_zeros new_ones empty copy native_dropout dropout fill zero
    scaled_dot_product_attention lift_fresh_copy narrow pad type_as
""".split()


def check_normal_form(graph):
    """Nothing is left of the other spellings; sizes and bounds are written out; no device is named."""
    outputs = set(graph.outputs.values())
    for node in graph.nodes:
        name = node.op.split(".")[1]
        assert name not in GONE or (name == "clone" and node.outputs[0] in outputs), node
        assert not {"device", "layout", "pin_memory", "memory_format"} & node.kwargs.keys(), node
        if name in ("view", "expand"):
            assert node.args[1] == node.outputs[0].shape, node
            assert node.args[0].shape != node.args[1], node
        if name == "slice":
            x, dim, start, end, step = node.args
            assert 0 <= dim < len(x.shape) and 0 <= start <= end <= x.shape[dim], node


# -- dropout and attention -------------------------------------------------------------------------------------------


class Drops(nn.Module):
    """Dropout of all forms, in an order that the sites must keep."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        a = self.drop(self.layer(x))
        b = F.dropout(a, 0.0) + F.dropout(a, 0.25, inplace=False)
        c = F.dropout2d(b[:, :, None, None].expand(-1, -1, 3, 3), 0.5)
        d = F.dropout(b, 0.75)
        return (c.mean((2, 3)) + d).square().sum()


def test_dropout():
    """Sites count in the order of execution, and only where something is drawn."""
    captured = capture(request_of("tests.capture.test_normalize:Drops", {"x": torch.randn(5, 6)}))
    found = [(n.args[1:], n.args[0].shape) for n in captured.graph.nodes if n.op == "planc.dropout"]
    assert found == [((0.3, 0), (5, 6)), ((0.25, 1), (5, 6)), ((0.5, 2), (5, 6, 1, 1)), ((0.75, 3), (5, 6))]


ATTENTION = {
    # name: (query, key, value shapes, keyword arguments; mask as a function of nothing)
    "plain": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {}),
    "causal": ((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8), {"is_causal": True}),
    "causal_uneven": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"is_causal": True}),
    "scale": ((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8), {"scale": 0.3}),
    "wide_values": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 3), {}),
    "grouped": ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8), {"enable_gqa": True, "is_causal": True}),
    "one_key_head": ((2, 4, 5, 8), (2, 1, 5, 8), (2, 1, 5, 8), {"enable_gqa": True}),
    "three_dims": ((4, 5, 8), (4, 7, 8), (4, 7, 8), {}),
    "two_dims": ((5, 8), (7, 8), (7, 8), {}),
    "five_dims": ((2, 3, 4, 5, 8), (2, 3, 4, 5, 8), (2, 3, 4, 5, 8), {}),
    "bool_mask": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"attn_mask": lambda: torch.rand(2, 1, 5, 7) > 0.3}),
    "empty_rows": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"attn_mask": lambda: torch.arange(5)[:, None] > torch.ones(7) * 2}),
    "bias": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"attn_mask": lambda: torch.randn(4, 5, 7)}),
}  # fmt: skip


class Attends(nn.Module):
    def __init__(self, name):
        super().__init__()
        *shapes, self.options = ATTENTION[name]
        self.q, self.k, self.v = (nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x, mask=None):
        options = {key: item for key, item in self.options.items() if key != "attn_mask"}
        y = F.scaled_dot_product_attention(self.q * x, self.k, self.v, attn_mask=mask, **options)
        return y.square().sum()


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    with float64():
        torch.manual_seed(0)
        batch = {"x": torch.randn(8)}
        if "attn_mask" in ATTENTION[name][3]:
            batch["mask"] = ATTENTION[name][3]["attn_mask"]()
        factory = "tests.capture.test_normalize:Attends"
        captured = capture(request_of(factory, batch, options={"name": name}, dtype="float64"))
        assert_same_program(captured, build(factory, {"name": name}), batch)
        (node,) = (n for n in captured.graph.nodes if n.op == "planc.attention")
        q, k, v, mask, causal, scale, p, site = node.args
        assert isinstance(scale, float) and isinstance(causal, bool) and (p, site) == (0.0, None)
        if len(q.shape) > 2:
            assert q.shape[:-3] == k.shape[:-3] == v.shape[:-3] and q.shape[-3] % k.shape[-3] == 0
            assert k.shape[-3] == v.shape[-3]
