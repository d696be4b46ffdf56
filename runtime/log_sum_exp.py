"""Log-sum-exp along a dimension that is cut over ranks: two small reductions in place of a gather."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor, str], Tensor]
"""(a tensor, "max" or "sum") to its reduction over the ranks."""


def log_sum_exp(x: Tensor, dim: int, real: int, reduce: Reduce) -> Tensor:
    """log Σ exp(x) along `dim` of the whole, which keeps size 1; only the first `real` of this part are no padding.
    16-bit numbers are summed in float32, which is the result's dtype then.

    The largest is subtracted first; in a line of nothing but -inf, or with +inf, that would make NaN of what is inf.
    """
    own = x.narrow(dim, 0, real)
    wide = torch.promote_types(x.dtype, torch.float32)
    shape = [1 if k == dim else size for k, size in enumerate(x.shape)]
    largest = own.amax(dim, keepdim=True).to(wide) if real else own.new_full(shape, float("-inf"), dtype=wide)
    largest = reduce(largest, "max")
    largest = largest.masked_fill(largest.isinf(), 0.0)
    return reduce(torch.sub(own, largest).exp_().sum(dim, keepdim=True), "sum").log_().add_(largest)
