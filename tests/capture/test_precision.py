"""Capturing in a lower dtype: all parameters, or operation by operation as torch.autocast does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compiler.capture import CaptureRequest, capture
from compiler.capture.autocast import FLOAT32, LOWER, WIDEST, autocasting, operator_lists
from compiler.capture.model import convert_parameters
from compiler.diagnostics import PlanError
from compiler.precision import Autocast
from tests.capture.support import request_of, run_eager, run_graph
from tests.zoo import get

NAMES = (
    "mlp-tiny",
    "gpt-attention-dropout-tiny",
    "llama-tiny",
    "encdec-tiny",
    "vit-tiny",
    "c20_padding_idx",
    "hf-llama",
)
CLOSE = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Attention is eager's fused kernel there and its formula here: a rounding of the lower dtype, averaged over a loss."""


def captured(entry, batch, **more):
    return capture(CaptureRequest(entry.factory, entry.options, inputs=request_of("", batch).inputs, **more))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_in_a_lower_dtype(name, dtype):
    entry, lower = get(name), getattr(torch, dtype)
    batch = entry.batch(4)
    found = captured(entry, batch, compute=dtype)
    model = entry.build()
    buffers = {name: b.dtype for name, b in model.named_buffers()}
    assert {(p.dtype, p.own) for p in found.parameters.values()} == {(dtype, "float32")}
    assert {name: getattr(torch, b.dtype) for name, b in found.buffers.items()} == buffers
    convert_parameters(model, lower)
    got = run_graph(found, model, batch)["loss"]
    inputs = {key: value.to(lower) if value.is_floating_point() else value for key, value in batch.items()}
    want = run_eager(model, inputs, widen=False)["loss"]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=CLOSE[lower], atol=0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES + ("resnet-tiny",))
def test_autocast(name, device):
    entry, autocast = get(name), Autocast("bfloat16", device)
    batch = entry.batch(4)
    found = captured(entry, batch, autocast=autocast)
    assert {(p.dtype, p.own) for p in found.parameters.values()} == {("float32", "float32")}
    model = entry.build()
    got = run_graph(found, model, batch)["loss"]
    with operator_lists(autocast), autocasting(autocast):
        want = run_eager(model, batch, widen=False)["loss"]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=CLOSE[torch.float32], atol=0)


class Net(nn.Module):
    """A buffer that its code adds as it is; the loss function sees the targets as they came."""

    def __init__(self, cast: bool = True, fill: float = 0.0):
        super().__init__()
        self.a, self.b, self.cast, self.fill = nn.Linear(4, 4), nn.Linear(4, 1), cast, fill
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        h = self.a(x).softmax(-1) + (self.shift.to(x.dtype) if self.cast else self.shift)
        return self.b(h.masked_fill(h > 1.5, self.fill)).squeeze(-1)


def loss_of(output, batch):
    assert batch["y"].dtype == torch.float32
    return F.mse_loss(output.float(), batch["y"])


BATCH = {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), "y": torch.zeros(6)}


def net(options=None, **more):
    request = request_of("tests.capture.test_precision:Net", BATCH)
    loss = ("tests.capture.test_precision:loss_of", {})
    return capture(CaptureRequest(request.factory, options or {}, inputs=request.inputs, loss=loss, **more))


def test_the_model_gets_lower_inputs_and_the_loss_function_does_not():
    graph = net(compute="bfloat16").graph
    linear = next(node for node in graph.nodes if node.op == "aten.linear.default")
    assert linear.args[0].dtype == "bfloat16" and linear.args[0].producer.op == "planc.cast"
    assert {v.name: v.dtype for v in graph.inputs if v.kind == "batch"} == {"x": "float32", "y": "float32"}
    assert graph.outputs["loss"].dtype == "float32"


def test_a_buffer_that_meets_lower_parameters():
    with pytest.raises(PlanError) as error:
        net({"cast": False}, compute="bfloat16")
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.code == "E110" and "float32, bfloat16" in diagnostic.message
    assert "autocast = on" in diagnostic.help[0]
    net({"cast": False}, autocast=Autocast("bfloat16"))


def test_a_number_that_the_lower_dtype_does_not_have():
    with pytest.raises(PlanError) as error:
        net({"fill": -1e9}, compute="float16")
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.code == "E110" and "-1e+09" in diagnostic.message and "65504" in diagnostic.message
    net({"fill": -1e9}, compute="bfloat16")
    net({"fill": float("-inf")}, compute="float16")


def test_softmax_and_sums_by_the_lists_of_the_device():
    """CUDA's list takes in float32 what the CPU's leaves alone."""
    softmax = {
        d: next(n for n in net(autocast=Autocast("bfloat16", d)).graph.nodes if ".softmax." in n.op)
        for d in ("cpu", "cuda")
    }
    assert softmax["cpu"].outputs[0].dtype == "bfloat16"
    assert softmax["cuda"].outputs[0].dtype == "float32"
    with torch.autocast("cpu"):  # and what was registered is gone
        assert torch.ones(2, 2, dtype=torch.bfloat16).softmax(-1).dtype == torch.bfloat16


def test_the_lists_are_those_of_torch():
    """Private to torch: the operators that have an autocast kernel."""
    of = torch._C._dispatch_get_registrations_for_dispatch_key
    rest = {
        name.removeprefix("aten::")
        for name in set(of("AutocastCUDA")) - set(of("AutocastCPU"))
        if name.startswith("aten::")
    }
    parts = {"cudnn_convolution", "cudnn_convolution_transpose", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell",
             "_scaled_dot_product_flash_attention"}  # what CUDA kernels are made of, not reached from CPU tensors  # fmt: skip
    assert rest - parts <= {*FLOAT32, *LOWER, *WIDEST}
