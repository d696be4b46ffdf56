"""Capturing a model for a test, and running what was captured next to the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compiler.analysis.reference import Reference, scalars
from compiler.capture import Captured, CaptureRequest, Input, capture
from compiler.ir.interpret import interpret
from runtime import random

SEED = 5


def request_of(factory: str, batch: Mapping[str, Tensor], **more: Any) -> CaptureRequest:
    inputs = tuple(Input(k, str(v.dtype).removeprefix("torch."), tuple(v.shape)) for k, v in batch.items())
    return CaptureRequest(factory, inputs=inputs, **more)


def keep(shape: tuple[int, ...], p: float, site: int) -> Tensor:
    """The elements that dropout keeps, as the runtime chooses them in step 0."""
    index = random.global_index([torch.arange(size) for size in shape], shape)
    return random.keep_mask(index, p, random.key(SEED, 0, site))


def inputs_of(captured: Captured, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the graph's inputs are, from the model that it was captured of."""
    named = {**dict(model.named_parameters()), **{k: v.clone() for k, v in model.named_buffers()}}
    tensors = {**named, **batch, **captured.constants}
    return {value.name: tensors[value.name] for value in captured.graph.inputs}


def run_graph(captured: Captured, model: nn.Module, batch: Mapping[str, Tensor], **more: Any) -> dict[str, Tensor]:
    return interpret(captured.graph, inputs_of(captured, model, batch), keep, **more)


def run_eager(model: nn.Module, batch: Mapping[str, Tensor], widen: bool = True) -> dict[str, Tensor]:
    """Loss, metrics and new buffers by role, with the runtime's dropout."""
    mode = Reference(SEED, widen)
    mode.next_step(0)
    with mode:
        outputs = model(**{k: v.clone() for k, v in batch.items()})
    loss, metrics = scalars(outputs)
    roles = {"loss": loss} | {f"metric:{k}": torch.tensor(v, dtype=torch.float64) for k, v in metrics.items()}
    return roles | {f"buffer:{k}": v for k, v in model.named_buffers()}


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_program(captured: Captured, model: nn.Module, batch: Mapping[str, Tensor], tolerance: float = 1e-11) -> None:
    """The graph gives eager's loss, metrics, buffers and gradients."""
    found = run_graph(captured, model, batch)
    found_gradients = gradients(found["loss"], model)
    before = {name: value.clone() for name, value in model.named_buffers()}
    expected = run_eager(model, batch)
    now = dict(model.named_buffers())
    changed = {f"buffer:{name}" for name, value in before.items() if not torch.equal(value, now[name])}
    assert changed <= found.keys(), "changed buffers that the graph leaves alone"
    assert {role for role in expected if not role.startswith("buffer:")} == {r for r in found if not r.startswith("buffer:")}
    for role, value in found.items():
        torch.testing.assert_close(
            value.double(), expected[role].double().view(value.shape), rtol=tolerance, atol=tolerance, msg=lambda text: f"{role}: {text}"
        )
    for name, gradient in gradients(expected["loss"], model).items():
        mine = found_gradients[name]
        if gradient is None:
            assert mine is None or not mine.any(), f"{name} has a gradient, but not in eager"
        else:
            assert mine is not None, f"{name} has no gradient"
            torch.testing.assert_close(
                mine, gradient, rtol=1e-9, atol=1e-12, msg=lambda text: f"gradient of {name}: {text}"
            )


class float64:
    """A context in which tensors are made in float64."""

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
