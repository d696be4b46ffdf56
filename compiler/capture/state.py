"""What a model's forward keeps in the model for the next call.

Assigning a new tensor to a buffer changes its content, as writing into it does. What is assigned to other attributes
is forgotten between two runs of a program: a tensor that was not there before is a cache, which the program computes
anew; a number is fixed at what it was. Both are noted. Python's and numpy's random numbers would be drawn once, when
the model is traced, and never again: they are refused.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from torch import Tensor, nn

from compiler.capture.failures import Unsupported
from compiler.ir.graph import Origin

PLAIN = (bool, int, float, str)
OWN = {"_parameters", "_buffers", "_modules"}


class State:
    """The attributes of all modules, before forward runs."""

    def __init__(self, model: nn.Module):
        self.modules = [
            (path, module, dict(vars(module)), dict(module._buffers), dict(module._parameters))
            for path, module in model.named_modules()
        ]
        self.drawn = _random_state()

    def settle(self) -> list[str]:
        """Write assigned buffers into the old ones, and take back other assignments; returns notes."""
        notes: list[str] = []
        if _random_state() != self.drawn:
            raise Unsupported("the forward draws random numbers of Python's or numpy's", Origin(), "E121")
        for path, module, attributes, buffers, parameters in self.modules:
            prefix = f"{path}." if path else ""
            for name, value in module._parameters.items():
                if value is not parameters.get(name):
                    raise Unsupported(f"the forward replaces the parameter `{prefix}{name}`", Origin(path), "E124")
            for name, value in list(module._buffers.items()):
                if value is not buffers.get(name):
                    notes += self.buffer(module, name, f"{prefix}{name}", buffers.get(name), value)
            for name, value in list(vars(module).items()):
                if name not in OWN and value is not attributes.get(name):
                    notes += self.attribute(module, name, f"{prefix}{name}", attributes, value)
        return notes

    def buffer(self, module: nn.Module, name: str, path: str, old: Tensor | None, new: Tensor | None) -> list[str]:
        if old is None or new is None:
            module._buffers[name] = old
            return [_cached(path)]
        if old.shape != new.shape:
            raise Unsupported(f"the forward gives the buffer `{path}` another shape", Origin(path.rpartition(".")[0]))
        old.copy_(new.detach())
        module._buffers[name] = old
        return []

    def attribute(
        self, module: nn.Module, name: str, path: str, attributes: dict[str, Any], value: Any
    ) -> list[str]:
        if isinstance(value, Tensor):
            if name in attributes:
                vars(module)[name] = attributes[name]
            else:
                del vars(module)[name]
            return [_cached(path)]
        before = attributes.get(name)
        if isinstance(value, PLAIN) and isinstance(before, PLAIN) and value != before:
            return [f"the forward changes `{path}`: a program keeps to the value of its first call"]
        return []


def _cached(path: str) -> str:
    return f"the forward keeps a tensor in `{path}` for its next call: a program computes it anew each time"


def _random_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, keys.tobytes(), tuple(rest)  # type: ignore[union-attr]
