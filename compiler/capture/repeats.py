"""Does a forward that keeps something in the model do the same in every call?

A program is one call, over and over. A table that is made at the first call and found at the others is no matter; a
running mean in a list, a counter in the arithmetic, or a first batch that is treated in its own way is another model.
The forward runs three times on fake tensors, and what it does to data is compared: the operators with their arguments,
and whether one reads what an earlier call has left. Data is what depends on the batch, the parameters, the buffers that
change, or chance; all else is the same in every call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compiler.capture.origins import code_at, shown
from compiler.capture.rows import model_line
from compiler.ir.graph import Origin

KEEP = "keep it in a buffer (self.register_buffer), which a program carries from step to step"


@dataclass(frozen=True)
class Step:
    """One operator on data: the call (op, arguments), and the line of the model."""

    call: str
    line: tuple[str, int]


class _Calls(TorchDispatchMode):
    """Records the operators of calls one after the other. Data is known by its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[Step]] = []
        self.constant: list[set[str]] = []
        self.data: dict[int, int] = {}
        """Memory → the call in which it became data."""
        self.old: Step | None = None
        """The first operator that reads data of an earlier call."""
        self.alive: list[Tensor] = []  # so that no identity is used again

    def begin(self, given: Iterable[Tensor]) -> None:
        """Another call, for which these tensors are data."""
        self.steps.append([])
        self.constant.append(set())
        for tensor in given:
            self.mark(tensor)

    def mark(self, tensor: Tensor) -> None:
        self.alive.append(tensor)
        self.data[_memory(tensor)] = len(self.steps)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        result = func(*args, **kwargs)
        step = Step(f"{func} {pytree.tree_map(_described, (args, kwargs))}", model_line())
        made = [item for item in pytree.tree_leaves(result) if isinstance(item, Tensor)]
        self.alive += made
        since = [self.data[memory] for memory in map(_memory, operands) if memory in self.data]
        if since and min(since) < len(self.steps) and self.old is None:
            self.old = step
        if since or torch.Tag.nondeterministic_seeded in func.tags:
            self.steps[-1].append(step)
            written = [item for item in operands if func._schema.is_mutable and _memory(item) not in self.data]
            for tensor in (*made, *written):
                self.mark(tensor)
        else:
            self.constant[-1].add(step.call)
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _described(item: Any) -> Any:
    return (tuple(item.shape), item.dtype) if isinstance(item, Tensor) else item


def difference(run: Callable[[], Any], data: Callable[[], Iterable[Tensor]]) -> tuple[str, Origin] | None:
    """What later calls of the forward do in another way, and where. `data` gives the tensors that are data now."""
    calls = _Calls()
    with torch.no_grad():
        for k in range(3):
            calls.begin(data())
            try:
                with calls:
                    run()
            except Exception as error:
                return (f"the forward fails in its second call: {type(error).__name__}", Origin()) if k else None
    if calls.old is not None:
        return "the forward uses a tensor that an earlier call has left", _origin(calls.old)
    for later in (1, 2):
        for usual, other in itertools.zip_longest(calls.steps[0], calls.steps[later]):
            if usual is None or other is None or usual.call != other.call:
                return "the forward does not do the same in every call", _origin(usual or other)
        if not calls.constant[later] <= calls.constant[0]:
            return "the forward does not make the same constants in every call", Origin()
    return None


def _origin(step: Step) -> Origin:
    file, line = step.line
    return Origin("", f"{shown(file)}:{line}", code_at(file, line)) if file else Origin()
