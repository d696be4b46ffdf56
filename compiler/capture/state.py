"""What a model's forward keeps in the model for the next call.

Assigning a new tensor to a buffer changes its content, as writing into it does. What is assigned to other attributes
or put into their lists and tables is forgotten between two runs of a program: a tensor is taken for a cache, which the
program computes anew; a number is fixed at what it was. Both are noted, and `compiler.capture.repeats` sees to it that
they make no difference. Python's and numpy's random numbers would be drawn once, when
the model is traced, and never again: they are refused.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compiler.capture.failures import Unsupported
from compiler.capture.opaque import runs_as_it_is
from compiler.ir.graph import Origin

PLAIN = (bool, int, float, str, type(None))
MANY = 1000
"""Longer containers are not looked into."""
OWN = set(vars(nn.Module()))
"""What every module has."""


class State:
    """The attributes of all modules, before forward runs."""

    def __init__(self, model: nn.Module):
        self.modules = [
            (path, module, dict(vars(module)), dict(module._buffers), dict(module._parameters))
            for path, module in model.named_modules()
        ]
        self.drawn = _random_state()
        opaque = [module for _, module, *_ in self.modules if runs_as_it_is(module)]
        self.opaque = {id(inner) for module in opaque for inner in module.modules()}
        """Modules that the program calls, and that keep what they like."""
        self.held = {id(tensor) for _, _, _, *tables in self.modules for table in tables for tensor in table.values()}
        self.containers: dict[int, tuple[str, Any, Any]] = {}
        """The models' own lists, tables and sets, at any depth: (path of the attribute, it, a copy)."""
        for path, module, attributes, _, _ in self.modules:
            for name, value in attributes.items():
                if name not in OWN and id(module) not in self.opaque:
                    self.contain(f"{path}.{name}" if path else name, value)

    def contain(self, path: str, item: Any) -> None:
        if id(item) in self.containers:
            return
        if isinstance(item, (list, dict, set, deque)):
            self.containers[id(item)] = path, item, copy.copy(item)
        if isinstance(item, (list, tuple, deque, dict)) and len(item) < MANY:
            for part in item.values() if isinstance(item, dict) else item:
                if isinstance(part, (list, tuple, dict, set, deque)):
                    self.contain(path, part)

    def restore(self) -> None:
        """Everything but the contents of tensors as it was."""
        for _, module, attributes, buffers, _ in self.modules:
            module._buffers.update(buffers)
            for name in [name for name in vars(module) if name not in attributes]:
                del vars(module)[name]
            vars(module).update(attributes)
        for _, now, before in self.containers.values():
            _refill(now, before)

    def settle(self, returned: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Write assigned buffers into the old ones, and take back other assignments.

        Gives `returned` as it was before that, and notes.
        """
        notes: list[str] = []
        if _random_state() != self.drawn:
            raise Unsupported("the forward draws random numbers of Python's or numpy's", Origin(), "E121")
        assigned: list[tuple[str, Tensor, Tensor]] = []
        for path, module, attributes, buffers, parameters in self.modules:
            prefix = f"{path}." if path else ""
            for name, value in module._parameters.items():
                if value is not parameters.get(name):
                    raise Unsupported(f"the forward replaces the parameter `{prefix}{name}`", Origin(path), "E124")
            for name, value in list(module._buffers.items()):
                old = buffers.get(name)
                if value is old:
                    continue
                if old is None or value is None:
                    notes.append(_cached(f"{prefix}{name}"))
                else:
                    assigned.append((f"{prefix}{name}", old, value))
                module._buffers[name] = old
            for name, value in list(vars(module).items()):
                if name not in OWN and value is not attributes.get(name):
                    notes += self.attribute(module, name, f"{prefix}{name}", attributes, value)
        for path, now, before in self.containers.values():
            if not _same(now, before):
                notes += [_cached(path)] if self.tells(now) else []
                _refill(now, before)
        return self.written(assigned, returned), notes

    def written(self, assigned: list[tuple[str, Tensor, Tensor]], returned: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`returned`, once every old buffer holds what was assigned.

        One buffer may have been given another's tensor, and returned tensors may be old buffers: all are read before
        the first is written.
        """
        if not assigned:
            return dict(returned)
        kept = {name: tensor.clone() for name, tensor in returned.items()}
        held = [id(tensor) for _, _, _, buffers, _ in self.modules for tensor in buffers.values() if tensor is not None]
        contents = []
        for path, old, new in assigned:
            origin = Origin(path.rpartition(".")[0])
            if old.shape != new.shape:
                raise Unsupported(f"the forward gives the buffer `{path}` another shape", origin)
            if _kind(old) != _kind(new):
                types = " instead of ".join(str(x.dtype).removeprefix("torch.") for x in (new, old))
                raise Unsupported(f"the forward gives the buffer `{path}` another dtype: {types}", origin)
            if held.count(id(old)) > 1:
                raise Unsupported(
                    f"the forward assigns to the buffer `{path}`, which is the same tensor as another one", origin,
                    help="write into it in place, or give each buffer a tensor of its own",
                )  # fmt: skip
            contents.append(new.detach().clone())
        for (_, old, _), content in zip(assigned, contents):
            old.copy_(content)
        return kept

    def attribute(
        self, module: nn.Module, name: str, path: str, attributes: dict[str, Any], value: Any
    ) -> list[str]:
        before = attributes.get(name)
        if name in attributes:
            vars(module)[name] = before
        else:
            del vars(module)[name]
        if id(module) in self.opaque:
            return []
        if isinstance(value, (Tensor, list, tuple, dict, set, deque)):
            return [_cached(path)] if self.tells(value) else []
        if isinstance(value, PLAIN) and value != before:
            return [f"the forward changes `{path}`: a program keeps to the value of its first call"]
        return []

    def tells(self, item: Any) -> bool:
        """Whether something new is kept: more than the model's own parameters and buffers, by another way."""
        leaves = pytree.tree_leaves(list(item) if isinstance(item, set) else item)
        return not leaves or any(isinstance(leaf, (Tensor, *PLAIN)) and id(leaf) not in self.held for leaf in leaves)


def _same(now: Any, before: Any) -> bool:
    """Whether a container holds the same objects as its copy."""
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(key in before and before[key] is value for key, value in now.items())
    return now == before if isinstance(now, set) else all(a is b for a, b in zip(now, before))


def _refill(now: Any, before: Any) -> None:
    if not _same(now, before):
        now.clear()
        (now.update if isinstance(now, (dict, set)) else now.extend)(before)


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.dtype == torch.bool


def _cached(path: str) -> str:
    return f"the forward keeps a tensor in `{path}` for its next call: a program computes it anew each time"


def _random_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, keys.tobytes(), tuple(rest)  # type: ignore[union-attr]
