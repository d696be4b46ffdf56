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


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_what_the_graph_does_not_say(entry):
    model = build(entry.factory, entry.options)
    captured = capture(request_of(entry.factory, entry.batch(4), options=entry.options))
    assert list(captured.parameters) == [name for name, _ in model.named_parameters()]
    assert list(captured.buffers) == [name for name, _ in model.named_buffers()]
    for name, parameter in model.named_parameters():
        info = captured.parameters[name]
        assert (info.shape, info.dtype) == (tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
    assert set(captured.modules) == {path for path, _ in model.named_modules(remove_duplicate=False)}
    text = print_graph(captured.graph)
    assert print_graph(parse_graph(text)) == text
