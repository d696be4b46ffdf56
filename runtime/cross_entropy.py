"""Cross entropy over a vocabulary that is cut over ranks (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053).

Each rank holds logits [n, c, …] of its classes. Two small reductions, of the maxima and of a few sums, take the place
of gathering the logits. Semantics are those of torch's `cross_entropy(reduction="none")` with class indices: weights,
`ignore_index` and label smoothing included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor, str], Tensor]


def forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore: int, smoothing: float, start: int, real: int,
    classes: int, reduce: Reduce,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(losses [n, …], log-sum-exps [n, …]). The rank's classes begin at `start`; the first `real` are no padding."""
    dim = 1 if logits.dim() > 1 else 0
    own = logits.narrow(dim, 0, real)
    wide = torch.float32 if logits.dtype in (torch.bfloat16, torch.float16) else logits.dtype
    empty = target.shape
    largest = own.amax(dim).to(wide) if real else torch.full(empty, float("-inf"), dtype=wide, device=logits.device)
    largest = reduce(largest, "max")
    index, mine = _own_class(target, start, real)
    sums = [
        torch.sub(own, largest.unsqueeze(dim)).exp_().sum(dim),
        torch.where(mine, _at(own, index, dim).to(wide), 0.0),
    ]
    if weight is not None:
        sums.append(torch.where(mine, _at_weight(weight, index).to(wide), 0.0))
    if smoothing:
        shape = [-1 if k == dim else 1 for k in range(own.dim())]
        scaled = own.to(wide) if weight is None else own.to(wide) * weight[:real].to(wide).view(shape)
        sums.append(scaled.sum(dim))
        whole = torch.full((), float(real), dtype=wide) if weight is None else weight[:real].to(wide).sum()
        sums.append(whole.to(logits.device).expand(empty))
    total = reduce(torch.stack(sums), "sum")
    lse = total[0].log() + largest
    at = 2 if weight is None else 3
    per_class = 1.0 if weight is None else total[2]
    losses = (lse - total[1]) * per_class
    if smoothing:
        spread = lse * total[at + 1] - total[at]
        losses = losses * (1.0 - smoothing) + spread * (smoothing / classes)
    return torch.where(target == ignore, 0.0, losses).to(logits.dtype), lse


def backward(
    gradient: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, lse: Tensor, ignore: int, smoothing: float,
    start: int, real: int, classes: int, reduce: Reduce,
) -> Tensor:  # fmt: skip
    """The gradient of the rank's logits: softmax minus the (smoothed) target, weighted."""
    dim = 1 if logits.dim() > 1 else 0
    wide = lse.dtype
    index, mine = _own_class(target, start, real)
    scale = torch.where(target == ignore, 0.0, gradient.to(wide))
    per_class: Tensor | float = 1.0
    total: Tensor | float = float(classes)
    if weight is not None:
        own_weights = weight[:real].to(wide)
        parts = [torch.where(mine, _at_weight(weight, index).to(wide), 0.0), own_weights.sum().expand(target.shape)]
        per_class, total = reduce(torch.stack(parts), "sum")
    mass = (1.0 - smoothing) * per_class + smoothing / classes * total
    # In the one tensor of the result: the softmax, then what is subtracted from it.
    result = torch.empty_like(logits, dtype=wide)
    own = result.narrow(dim, 0, real)
    result.narrow(dim, real, result.shape[dim] - real).zero_()
    torch.sub(logits.narrow(dim, 0, real), lse.unsqueeze(dim), out=own).exp_().mul_((scale * mass).unsqueeze(dim))
    if smoothing:
        shape = [-1 if k == dim else 1 for k in range(own.dim())]
        each: Tensor | float = 1.0 if weight is None else weight[:real].to(wide).view(shape)
        own.sub_(scale.unsqueeze(dim) * (smoothing / classes) * each)
    if real:
        hit = torch.where(mine, scale * (1.0 - smoothing) * per_class, 0.0)
        own.scatter_add_(dim, index.unsqueeze(dim), -hit.unsqueeze(dim))
    return result.to(logits.dtype)


def _own_class(target: Tensor, start: int, real: int) -> tuple[Tensor, Tensor]:
    """(position among the rank's classes, clamped; whether the target is one of them)."""
    local = target - start
    mine = (local >= 0) & (local < real)
    return local.clamp(0, max(real - 1, 0)), mine


def _at(own: Tensor, index: Tensor, dim: int) -> Tensor:
    if own.shape[dim] == 0:
        return torch.zeros(index.shape, dtype=own.dtype, device=own.device)
    return own.gather(dim, index.unsqueeze(dim)).squeeze(dim)


def _at_weight(weight: Tensor, index: Tensor) -> Tensor:
    return weight[index] if weight.numel() else torch.zeros(index.shape, dtype=weight.dtype, device=weight.device)
