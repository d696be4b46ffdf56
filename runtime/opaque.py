"""Opaque modules: run as they are, on parameters and buffers that are passed in.

A call is described by a JSON text, so that it can stand in a program:

    {"args": [{"tensor": 0}, null], "kwargs": {}, "state": ["weight", "bias"], "changed": []}

A `{"tensor": k}` stands for the k-th tensor; lists, tuples (`{"tuple": […]}`) and dicts (`{"dict": {…}}`) hold others;
all else is plain. After the tensors of the arguments come those of `state`, the module's own parameters and buffers by
name. `changed` names the buffers that the call changes: their new values follow the results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class OpaqueError(TypeError):
    """An argument of an opaque module cannot be written down."""


def call_opaque(module: nn.Module, call: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the module: the tensors that it returns, in order, then the new values of the buffers that it changes."""
    described = json.loads(call)
    names = described["state"]
    count = len(tensors) - len(names)
    state = dict(zip(names, tensors[count:]))
    state |= {name: state[name].clone() for name in described["changed"]}
    args, kwargs = (decode(described[key], tensors[:count]) for key in ("args", "kwargs"))
    returned, after = run_on(module, state, args, kwargs)
    changed = (after[name].detach().to(state[name].dtype) for name in described["changed"])
    return (*tensors_of(returned), *changed)


def run_on(
    module: nn.Module, state: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, Tensor]]:
    """(what the module returns with these parameters and buffers, what it holds by their names at the end).

    Whether it writes into a buffer or assigns a new tensor to it: the module itself stays as it was.
    """
    holder = _Holder(module)
    named = {f"module.{name}": tensor for name, tensor in state.items()}
    returned = torch.func.functional_call(holder, named, tuple(args), dict(kwargs))
    return returned, {name: holder.after.get(name, tensor) for name, tensor in state.items()}


class _Holder(nn.Module):
    """Calls a module, and looks at what it holds before functional_call takes it back."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.after: dict[str, Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned = self.module(*args, **kwargs)
        held = (self.module.named_parameters, self.module.named_buffers)
        self.after = {name: tensor for named in held for name, tensor in named(remove_duplicate=False)}
        return returned


def tensors_of(returned: Any) -> list[Tensor]:
    """The tensors in what a module returned, in order."""
    return [item for item in pytree.tree_leaves(returned) if isinstance(item, Tensor)]


def describe(
    args: Sequence[Any], kwargs: dict[str, Any], state: Sequence[str], changed: Sequence[str]
) -> tuple[str, list[Tensor]]:
    """(the description of a call, the tensors among its arguments). Raises OpaqueError."""
    tensors: list[Tensor] = []
    tree = {"args": [encode(x, tensors) for x in args], "kwargs": {k: encode(x, tensors) for k, x in kwargs.items()}}
    return json.dumps(tree | {"state": list(state), "changed": list(changed)}), tensors


def encode(item: Any, tensors: list[Tensor]) -> Any:
    """An argument as JSON; its tensors are appended to `tensors`."""
    if isinstance(item, Tensor):
        tensors.append(item)
        return {"tensor": len(tensors) - 1}
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    if type(item) is list:
        return [encode(x, tensors) for x in item]
    if type(item) is tuple:
        return {"tuple": [encode(x, tensors) for x in item]}
    if type(item) is dict and all(isinstance(key, str) for key in item):
        return {"dict": {key: encode(x, tensors) for key, x in item.items()}}
    raise OpaqueError(f"a {type(item).__name__} is passed to it, but only tensors, numbers, texts, lists and dicts can be")


def decode(item: Any, tensors: Sequence[Tensor]) -> Any:
    """The argument that `encode` wrote down."""
    if isinstance(item, list):
        return [decode(x, tensors) for x in item]
    if not isinstance(item, dict):
        return item
    if set(item) == {"tensor"} and isinstance(item["tensor"], int):
        return tensors[item["tensor"]]
    if set(item) == {"tuple"}:
        return tuple(decode(x, tensors) for x in item["tuple"])
    inside = item["dict"] if set(item) == {"dict"} else item
    return {key: decode(x, tensors) for key, x in inside.items()}
