"""Building the model without its memory: every tensor is fake (a shape and a dtype, on "the CPU")."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runtime.factory import FactoryError, build, resolve

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass
class Built:
    """A model whose tensors are fake (of `mode`), or, where its constructor looks at values, real (`mode` None)."""

    model: nn.Module
    mode: FakeTensorMode | None


def build_model(factory: str, options: Mapping[str, object], base: str | None, dtype: torch.dtype | None) -> Built:
    """Call the factory. Raises FactoryError.

    Fake tensors on the CPU rather than meta ones: code that makes tensors without naming a device then mixes with the
    parameters as it does in eager. A constructor that reads a value (`.item()`) cannot run on them: it gets real ones.
    """
    resolve(factory, base)  # imported here, not among fake tensors
    if dtype is not None and dtype.is_floating_point:
        torch.set_default_dtype(dtype)
    mode = FakeTensorMode()
    try:
        with mode, converting():
            return Built(_converted(build(factory, options, base), dtype), mode)
    except FactoryError as error:
        if not _needs_values(error):
            raise
    return Built(_converted(build(factory, options, base), dtype), None)


@contextlib.contextmanager
def converting() -> Iterator[None]:
    """`model.double()`, `.to(dtype)` and their like put new parameters in the place of the old.

    Their own way, exchanging the contents of two tensors, does not work for fake ones.
    """
    done: dict[int, tuple[Tensor, Tensor]] = {}  # old tensors are kept, so that no identity is used again

    def replaced(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if id(tensor) not in done:
            with torch.no_grad():
                new = function(tensor)
            if new is not tensor and isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            done[id(tensor)] = tensor, new
            done[id(new)] = new, new  # a tie meets it again
        return done[id(tensor)][1]

    def apply(self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if not nested:
            done.clear()  # another conversion
        nested.append(self)
        try:
            for child in self.children() if recurse else ():
                child._apply(function)
            for table in (self._parameters, self._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = replaced(tensor, function)
        finally:
            nested.pop()
        return self

    nested: list[nn.Module] = []
    with mock.patch.object(nn.Module, "_apply", apply):
        yield


def _needs_values(error: FactoryError) -> bool:
    """Whether a constructor failed because there are no values, rather than by its own fault."""
    cause = error.__cause__
    if cause is None:
        return False
    module = type(cause).__module__
    text = str(cause)
    return module.startswith(("torch._subclasses", "torch.fx")) or "Fake" in text or "fake" in text or "meta" in text


def convert_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Every floating parameter in `dtype`, buffers as they are."""
    _converted(model, dtype, buffers=False)


def _converted(model: nn.Module, dtype: torch.dtype | None, buffers: bool = True) -> nn.Module:
    """Every floating parameter and buffer in `dtype`; ties stay ties."""
    if dtype is None:
        return model
    done: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers) if buffers else (module._parameters,):
            for name, tensor in table.items():
                if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
                    continue
                if id(tensor) not in done:
                    new = tensor.detach().to(dtype)
                    keep = isinstance(tensor, nn.Parameter)
                    done[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if keep else new
                table[name] = done[id(tensor)]
    return model


def canonical_names(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """(every parameter and buffer name → the first name of that tensor, only those whose first name is another)."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        names[name] = first.setdefault(id(tensor), name)
    return names, {name: known for name, known in names.items() if name != known}


def module_tables(model: nn.Module) -> tuple[dict[str, str], dict[str, list[str]]]:
    """(module path → class name, container path → its children's paths).

    A ModuleList holds layers, however few. A Sequential or ModuleDict of one child is only a wrapper, and left out.
    """
    classes, lists = {}, {}
    for path, module in model.named_modules(remove_duplicate=False):
        classes[path] = type(module).__name__
        if isinstance(module, CONTAINERS) and (len(module) > 1 or isinstance(module, nn.ModuleList)):
            prefix = f"{path}." if path else ""
            lists[path] = [prefix + name for name, _ in module.named_children()]
    return classes, lists
