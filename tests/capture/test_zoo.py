"""The captured graph of every model of the zoo computes what the model computes: loss, metrics, buffers, gradients."""

import pytest
import torch

from compiler.capture import capture
from compiler.ir.text import parse_graph, print_graph
from compiler.ir.verify import verify_graph
from runtime.factory import build
from tests.capture.support import assert_same_program, float64, request_of
from tests.zoo import ZOO

MODELS = [entry for entry in ZOO if entry.expect != "diagnostic"]


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_graph_equals_eager(entry):
    with float64():
        torch.manual_seed(0)
        model = build(entry.factory, entry.options).double()
        batch = entry.batch(4)
        captured = capture(request_of(entry.factory, batch, options=entry.options, dtype="float64"))
        verify_graph(captured.graph)
        assert_same_program(captured, model, batch)
    assert list(captured.parameters) == [name for name, _ in model.named_parameters()]
    assert list(captured.buffers) == [name for name, _ in model.named_buffers()]
    assert all(captured.parameters[name].shape == tuple(p.shape) for name, p in model.named_parameters())
    assert set(captured.modules) == {path for path, _ in model.named_modules(remove_duplicate=False)}
    text = print_graph(captured.graph)
    assert print_graph(parse_graph(text)) == text
