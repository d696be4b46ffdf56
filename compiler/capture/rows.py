"""Does the model calculate with the number of rows as a number?

`loss.sum() / labels.numel()` writes the size of the batch into the graph as a constant. Such a model means something
else for a shorter batch, so neither an incomplete last batch nor rows that pad an uneven one can be exact. To know,
the forward runs on fake tensors at several batch sizes, and what it does is compared: the operators, the numbers among
their arguments (sizes of shapes may differ, numbers that enter the arithmetic may not), and the values of constants
that meet data: a row that is there at both sizes has the same in both (`arange` does, `linspace`, a flip or the sum of
`ones` do not). What depends on no data is therefore computed for real beside the fake run.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from compiler.capture.origins import code_at, is_own, is_torch, shown

NUMBERS = ("number", "Scalar", "float")
"""Schema types of arguments that take part in the arithmetic."""
SHAPED = ("aten.arange.", "aten.linspace.", "aten.range.")
"""Operators whose numbers may be sizes; what they make is looked at where it is used."""
SHAPES_ONLY = ("aten.ones_like.", "aten.zeros_like.", "aten.full_like.", "aten.new_ones.", "aten.new_zeros.", "aten.new_full.")
"""Operators of which an operand gives no more than its shape and dtype."""
PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.", "aten.matmul.", "aten.linear.", "aten.mv.", "aten.dot.")
"""Operators that sum over an index of their operands: a constant in one may give the result as many rows as it has."""
LARGEST = 1 << 20
"""Elements of the largest constant whose values are looked at: masks of scores are larger, and made of smaller ones."""


@dataclass(frozen=True)
class Use:
    """A number that depends on the rows: the operator, and the line of the model ("file.py:12", its text)."""

    op: str
    source: str
    code: str


class _Numbers(TorchDispatchMode):
    """Records every operator, the numbers and constants among its arguments, and the line of the model that called it."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[tuple[str, tuple[Any, ...], tuple[str, int]]] = []
        self.known: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a tensor that depends on no data, and its values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        values = [self.values(item) for item in given]
        if str(func).startswith(SHAPES_ONLY):
            given, values = [], []
        result = func(*args, **kwargs)
        numbers = list(_numbers(func, args, kwargs))
        if any(value is None for value in values):
            with _disable_current_modes():
                numbers += [value.clone() for value in values if value is not None]
            if str(func).startswith(PRODUCTS):
                numbers += [tuple(value.shape) for value in values if value is not None]
            for item in given if func._schema.is_mutable else ():
                self.known.pop(id(item), None)  # data may have been written into it
        else:
            self.compute(func, args, kwargs, result)
        self.uses.append((str(func), tuple(numbers), model_line()))
        return result

    def values(self, tensor: Tensor) -> Tensor | None:
        """What is in the tensor, if that is the same for all data."""
        if id(tensor) in self.known:
            return self.known[id(tensor)][1]
        return None if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.numel() > LARGEST else tensor

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The values, or a tensor of the same type where they do not matter."""
        value = self.values(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype) if value is None else value

    def compute(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """The same call on the values."""
        made = [item for item in tree_leaves(result) if isinstance(item, Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags or any(item.numel() > LARGEST for item in made):
            return
        with _disable_current_modes():
            args, kwargs = tree_map_only(Tensor, self.stand_in, (args, kwargs))
            if "device" in kwargs:
                kwargs["device"] = "cpu"
            found = [item for item in tree_leaves(func(*args, **kwargs)) if isinstance(item, Tensor)]
        self.known.update((id(item), (item, value)) for item, value in zip(made, found, strict=True))


def _numbers(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    if str(func).startswith(SHAPED):
        return
    given = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    for argument in func._schema.arguments:
        value = given.get(argument.name)
        plain = isinstance(value, (int, float)) and not isinstance(value, bool)
        # A number where the schema has a tensor is one that torch will wrap: `x / 8`.
        if plain and str(argument.type) in ("Tensor", *NUMBERS):
            yield value


def model_line() -> tuple[str, int]:
    """(file, line) of the innermost frame that is neither torch's nor planc's."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (is_torch(file) or is_own(file)):
            return file, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0


def row_constants(batch: Callable[[int], Any], run: Callable[[Any], Any], rows: int) -> Use | None:
    """The first place where the model does something else, or calculates with other numbers, for another batch size;
    or None. `run` runs it on what `batch` makes for a number of rows. Tried are one row more, one less, and half (not a single row, for which models may be entitled to fail)."""
    usual = _recorded(run, batch(rows))
    for count in dict.fromkeys((rows + 1, rows - 1, rows // 2)):
        if count > 1 and (use := _first_difference(usual, _recorded(run, batch(count)))) is not None:
            return use
    return None


def _recorded(run: Callable[[Any], Any], batch: Any) -> list[tuple[str, tuple[Any, ...], tuple[str, int]]]:
    mode = _Numbers()
    with torch.no_grad(), mode:
        run(batch)
    return mode.uses


def _first_difference(usual: list, other: list) -> Use | None:  # type: ignore[type-arg]
    nothing = ("", (), ("", 0))
    for (op, numbers, (file, line)), (other_op, other_numbers, _) in itertools.zip_longest(
        usual, other, fillvalue=nothing
    ):
        if op != other_op or not _agree(numbers, other_numbers):
            return Use(op, f"{shown(file)}:{line}" if file else "", code_at(file, line) if file else "")
    return None


def _agree(numbers: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether numbers are equal, and constants where both have an element."""
    return len(numbers) == len(others) and all(map(_same, numbers, others))


def _same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and one == other
    if one.dtype != other.dtype or one.dim() != other.dim():
        return False
    common = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape))
    with _disable_current_modes():
        return torch.equal(one[common].nan_to_num(), other[common].nan_to_num())
