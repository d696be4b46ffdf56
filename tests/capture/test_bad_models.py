"""Every bad model and factory gets a diagnostic with the right code, text and line, and leaves no trace behind."""

import inspect

import pytest
import torch
from torch import nn

from compiler.capture import CaptureRequest, Input, capture
from compiler.diagnostics import PlanError, Span, render
from tests.capture.bad import models

BAD = [item for item in vars(models).values() if isinstance(item, type) and issubclass(item, nn.Module) and item.__doc__]
BAD = [item for item in BAD if item.__doc__ and item.__doc__.startswith("E1")]
PLAN = Span("demo.plan", 1, 7, 1, 20)
SOURCES = {"demo.plan": 'model "tests.capture.bad"\n'}
INPUTS = {"x": ("float32", (6, 4)), "y": ("float32", (6, 4))}


def failure(factory, inputs=None, **more):
    found = tuple(Input(name, dtype, shape, span=PLAN) for name, (dtype, shape) in (inputs or INPUTS).items())
    request = CaptureRequest(factory, inputs=found, span=PLAN, sources=SOURCES, loss_span=PLAN, **more)
    with pytest.raises(PlanError) as caught:
        capture(request)
    assert all(d.span is not None for d in caught.value.diagnostics)
    return caught.value


def check(error, expected):
    text = render(error.diagnostics, SOURCES)
    for piece in expected.strip().split(" | "):
        assert piece.strip() in text, f"{piece!r} is not in:\n{text}"


@pytest.mark.parametrize("model", BAD, ids=lambda model: model.__name__)
def test_bad_model(model, capfd):
    before = torch.is_grad_enabled(), torch.get_default_dtype(), torch.random.get_rng_state()
    error = failure(f"tests.capture.bad.models:{model.__name__}", getattr(model, "INPUTS", None))
    check(error, model.__doc__)
    lines, start = inspect.getsourcelines(model)
    marked = [start + k for k, line in enumerate(lines) if "# HERE" in line]
    places = [(label.span.file, label.span.line) for d in error.diagnostics for label in d.related]
    if marked:
        assert places and places[0][1] == marked[0] and places[0][0].endswith("bad/models.py"), places
    assert capfd.readouterr() == ("", "")
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == before[:2]
    assert torch.equal(torch.random.get_rng_state(), before[2])
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert not torch.overrides._get_current_function_mode_stack()
