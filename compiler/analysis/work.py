"""What one operator costs, as the dispatcher sees it: floating-point operations, and bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from compiler.analysis.cost import GATHERS
from compiler.analysis.events import Compute
from compiler.analysis.flops import flops

FREE = ("aten.empty", "aten.new_empty", "aten.detach", "aten.set_", "aten.lift")
"""Operators that touch no element, besides the views."""

OVERWRITES = ("aten.copy_", "aten.fill_", "aten.zero_")
"""In-place operators that do not read what they write to."""


def work_of(func: Any, args: Any, kwargs: Any, result: Any, line: int) -> Compute | None:
    """The operator's work; None for one that moves nothing."""
    name = str(func)
    if is_view(func) or name.startswith(FREE):
        return None
    results = list(tensors(result))
    written = list(tensors(writes(func, args, kwargs))) or results
    read = list({id(item): item for item in tensors((args, kwargs))}.values())
    if name.startswith(OVERWRITES) or "out" in kwargs:
        read = [item for item in read if all(item is not other for other in written)]
    moved = sum(map(size, written))
    moved += moved + sum(map(size, read[1:])) if name.startswith(GATHERS) else sum(map(size, read))
    dtype = next((item.dtype for item in (*read, *written) if item.is_floating_point()), None)
    return Compute(name, flops(name, args, results), moved, str(dtype or "torch.float32").removeprefix("torch."), line)


def size(tensor: Tensor) -> int:
    """Bytes of memory that hold its elements: an expanded tensor has fewer than elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def tensors(argument: Any) -> Iterator[Tensor]:
    return (item for item in tree_leaves(argument) if isinstance(item, Tensor))


def writes(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that a call writes to."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    return [given[name] for name in written_names(func) if name in given]


@cache
def written_names(func: Any) -> tuple[str, ...]:
    return tuple(a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


@cache
def is_view(func: Any) -> bool:
    """Whether the result is a view of an argument."""
    arguments = func._schema.arguments
    return any(a.alias_info is not None for a in arguments) and not func._schema.is_mutable
