"""Reducing terms held by one process: the arithmetic of the in-process transport and of gloo's reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runtime.transport.errors import TransportError

REDUCE_OPS = ("sum", "avg", "max", "min", "and", "or")

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "and": torch.logical_and,
    "or": torch.logical_or,
}


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Refuse what some backend would do wrongly in silence: a bool sum wraps in gloo, an integer mean truncates."""
    if op not in _COMBINE:
        raise TransportError(f"unknown reduction {op!r}; known are {', '.join(REDUCE_OPS)}")
    if dtype is torch.bool and op in ("sum", "avg"):
        raise TransportError(f"a bool tensor cannot be reduced with {op!r}; use 'and', 'or', or an integer dtype")
    if dtype is not torch.bool and op in ("and", "or"):
        raise TransportError(f"{op!r} reduces bool tensors, not {dtype}; use 'min' or 'max'")
    if op == "avg" and not dtype.is_floating_point:
        raise TransportError(f"'avg' needs a floating-point tensor, got {dtype}")


def reduce_terms(terms: Sequence[Tensor], op: str, out: Tensor) -> None:
    """Write the reduction of two or more equally shaped `terms`, taken in order, into `out`.

    The order is the caller's, so the result does not depend on timing. 16-bit floats are summed in float32 and rounded
    once. `out` may be one of the terms; no other term is written.
    """
    combine = _COMBINE[op]
    if op in ("sum", "avg") and out.dtype in (torch.float16, torch.bfloat16):
        total = terms[0].float()
        for term in terms[1:]:
            total.add_(term)
        if op == "avg":
            total.div_(len(terms))
        out.copy_(total)
        return
    # A new tensor holds the running value until the last term, because `out` may still be needed as a term.
    total = terms[0]
    for index, term in enumerate(terms[1:-1]):
        total = combine(total, term) if index == 0 else combine(total, term, out=total)
    combine(total, terms[-1], out=out)
    if op == "avg":
        out.div_(len(terms))
