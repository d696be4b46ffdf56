"""What is exported: the model, its loss function, and the sorting of outputs by name.

What forward (or the `loss` function) may return:

- a tensor: the loss;
- a dict, a ModelOutput or a named tuple: its "loss" is the loss, other scalar tensors are metrics;
- a tuple or list: the first element is the loss, other scalar tensors are metrics named by their index.

Other outputs are dropped, with a note. A loss has one element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compiler.capture.failures import OutputError
from compiler.capture.state import State
from compiler.capture.tracing import Tracing
from runtime.factory import forward_inputs


@dataclass
class Outputs:
    """What the exported function returns: a role for each tensor, and notes."""

    roles: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Notes of what the forward keeps outside of buffers."""


class Exported(nn.Module):
    """`forward(*inputs)` calls the model by names and returns the tensors of `outputs.roles`."""

    def __init__(
        self, model: nn.Module, names: Sequence[str], loss: Callable[..., Any] | None, options: Mapping[str, Any],
        keep_outputs: bool, widen: bool, compute: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.model = model
        self.names, self.loss, self.options = tuple(names), loss, dict(options)
        self.keep_outputs, self.widen = keep_outputs, widen
        self.compute = compute
        self.passed = forward_inputs(model, self.names, loss is not None)
        self.outputs = Outputs()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.outputs  # changed in place: export undoes what forward assigns to attributes
        state = State(self.model)
        with Tracing(self.model, self.widen):
            returned = self.call(dict(zip(self.names, inputs)))
        unused: list[str] = []
        named = every_output(returned) if self.keep_outputs else loss_and_metrics(returned, unused)
        named, notes = state.settle(named)
        outputs.notes[:], outputs.kept[:] = notes + unused, notes
        outputs.roles[:] = named
        return tuple(named.values())

    def call(self, batch: Mapping[str, Tensor]) -> Any:
        """What the model, or the loss function, returns for a batch. The model gets its floating inputs in the dtype
        of its parameters, the loss function as they are."""
        returned = self.model(**{name: self.read(batch[name]) for name in self.passed})
        return self.loss(returned, dict(batch), **self.options) if self.loss is not None else returned

    def read(self, tensor: Tensor) -> Tensor:
        """An input as the model gets it."""
        return tensor.to(self.compute) if self.compute is not None and tensor.is_floating_point() else tensor


# -- sorting outputs -----------------------------------------------------------------------------------------------------


def named_outputs(returned: Any) -> dict[str, Any] | None:
    """Elements by name; the first of a tuple is called "loss". None: neither a tensor nor a collection."""
    if isinstance(returned, Tensor):
        return {"loss": returned}
    if isinstance(returned, Mapping):
        return {str(key): value for key, value in returned.items()}
    if hasattr(returned, "_asdict"):
        return dict(returned._asdict())
    if isinstance(returned, (tuple, list)):
        return {"loss" if k == 0 else str(k): value for k, value in enumerate(returned)}
    if hasattr(returned, "__dict__") and not isinstance(returned, nn.Module):
        return dict(vars(returned))
    return None


def loss_and_metrics(returned: Any, notes: list[str]) -> dict[str, Tensor]:
    """Role → tensor, the loss first. Raises OutputError if there is none."""
    named = named_outputs(returned)
    if named is None or named.get("loss") is None:
        raise OutputError("there is no loss in what the model returned", described(returned), list(named or {}))
    loss = named.pop("loss")
    if not isinstance(loss, Tensor):
        raise OutputError("the loss is not a tensor", described(loss), list(named))
    if loss.numel() != 1:
        raise OutputError("the loss is not a single number", described(loss), list(named))
    if not loss.is_floating_point():
        raise OutputError("the loss is not a floating-point number", described(loss), list(named))
    roles = {"loss": loss.reshape(())}
    for name, value in named.items():
        if isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
            roles[f"metric:{name}"] = value
        elif value is not None:
            notes.append(f"the model's output `{name}` ({described(value)}) is not used: only scalars are kept")
    return roles


def every_output(returned: Any) -> dict[str, Tensor]:
    """Role → tensor for all tensors at any depth."""
    roles: dict[str, Tensor] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, Tensor):
            roles[f"output:{name or 'output'}"] = item
            return
        if isinstance(item, (tuple, list)) and not hasattr(item, "_asdict"):
            children = {str(k): value for k, value in enumerate(item)}
        else:
            children = named_outputs(item) or {}
        for key, value in children.items():
            visit(f"{name}.{key}" if name else key, value)

    visit("", returned)
    if not roles:
        raise OutputError("the model returned no tensor", described(returned))
    return roles


def described(item: Any, depth: int = 0) -> str:
    """What the item is, in words: `float32[8, 10]`, `a dict with logits: float32[8, 10]`."""
    if isinstance(item, Tensor):
        return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    if item is None or isinstance(item, (bool, int, float, str)):
        return repr(item)
    named = named_outputs(item) if depth < 1 else None
    if isinstance(item, (tuple, list)) and not hasattr(item, "_asdict"):
        inside = ", ".join(described(value, depth + 1) for value in item[:6])
        return f"a {type(item).__name__} of {inside}" if item and depth < 1 else f"a {type(item).__name__}"
    if named:
        inside = ", ".join(f"{key}: {described(value, depth + 1)}" for key, value in list(named.items())[:8])
        return f"a {type(item).__name__} with {inside}"
    return f"a {type(item).__name__}"
