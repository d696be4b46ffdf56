"""Does the model calculate with the number of rows as a number?

`loss.sum() / labels.numel()` writes the size of the batch into the graph as a constant. Such a model means something
else for a shorter batch, so neither an incomplete last batch nor rows that pad an uneven one can be exact. To know,
the forward runs on fake tensors at several batch sizes, and what it does is compared: the operators, and the numbers
among their arguments (sizes of shapes may differ, numbers that enter the arithmetic may not).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiler.capture.origins import code_at, is_own, is_torch, shown

NUMBERS = ("number", "Scalar", "float")
"""Schema types of arguments that take part in the arithmetic."""
SHAPED = ("aten.arange.", "aten.linspace.", "aten.range.")
"""Operators whose numbers are sizes."""


@dataclass(frozen=True)
class Use:
    """A number that depends on the rows: the operator, and the line of the model ("file.py:12", its text)."""

    op: str
    source: str
    code: str


class _Numbers(TorchDispatchMode):
    """Records every operator, the numbers among its arguments, and the line of the model that called it."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[tuple[str, tuple[Any, ...], tuple[str, int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.uses.append((str(func), tuple(_numbers(func, args, kwargs or {})), model_line()))
        return func(*args, **(kwargs or {}))


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


def row_constants(run: Callable[[int], Any], rows: int) -> Use | None:
    """The first place where the model does something else, or calculates with other numbers, for another batch size;
    or None. Tried are one row more, one less, and half (not a single row, for which models may be entitled to fail)."""
    usual = _recorded(run, rows)
    for count in dict.fromkeys((rows + 1, rows - 1, rows // 2)):
        if count > 1 and (use := _first_difference(usual, _recorded(run, count))) is not None:
            return use
    return None


def _recorded(run: Callable[[int], Any], rows: int) -> list[tuple[str, tuple[Any, ...], tuple[str, int]]]:
    mode = _Numbers()
    with torch.no_grad(), mode:
        run(rows)
    return mode.uses


def _first_difference(usual: list, other: list) -> Use | None:  # type: ignore[type-arg]
    nothing = ("", (), ("", 0))
    for (op, numbers, (file, line)), (other_op, other_numbers, _) in itertools.zip_longest(
        usual, other, fillvalue=nothing
    ):
        if op != other_op or numbers != other_numbers:
            return Use(op, f"{shown(file)}:{line}" if file else "", code_at(file, line) if file else "")
    return None
