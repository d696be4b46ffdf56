"""Attention with its log-sum-exp: one operator, the kernel that the device has.

Shapes: query [..., h, s, d], key and value [..., h_kv, t, d] with h a multiple of h_kv; out like query, lse [..., h, s]
in float32 (float64 for float64). `mask` is bool (True: may attend) or additive, broadcast to [..., h, s, t].
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime import attention_kernels as kernels
from runtime.attention_kernels import Kernel
from runtime.devices import kind_of


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse). Rows that may attend to nothing give zeros and an lse of -inf."""
    kernel = choose(q, k, v, mask, causal)
    if kernel is None:
        return _reference(q, repeated(q, k), repeated(q, v), mask, causal, scale)
    if not kernel.shares_heads:
        k, v = repeated(q, k), repeated(q, v)
    bias = None if mask is None else additive(mask, q)
    out, lse = kernel.forward(*map(rows, (q, k, v)), bias, causal, scale)
    if bias is not None:
        blind = (bias == float("-inf")).all(-1)
        out, lse = out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, float("-inf"))
    return out, lse


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v (Dao et al. 2022, https://arxiv.org/abs/2205.14135: from the log-sum-exp, without the
    attention weights of the forward)."""
    kernel = choose(q, k, v, mask, causal)
    shared = kernel is not None and kernel.shares_heads
    kk, vv = (k, v) if shared else (repeated(q, k), repeated(q, v))
    if kernel is None:
        dq, dk, dv = _reference_backward(grad, q, kk, vv, mask, out, lse, causal, scale)
    else:
        bias = None if mask is None else additive(mask, q)
        if bias is not None:
            lse = lse.masked_fill(lse == float("-inf"), float("inf"))  # weights of zero, not -inf - -inf
        dq, dk, dv = kernel.backward(grad, *map(rows, (q, kk, vv)), bias, out, lse, causal, scale)
    return dq, folded(dk, k), folded(dv, v)


def choose(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Kernel | None:
    """The kernel for these operands on their device; None is the reference, which computes all weights."""
    device, widths = kind_of(q.device), (q.shape[-1], v.shape[-1])
    if q.dim() != 4 or 0 in (*q.shape, *k.shape) or (causal and mask is not None):
        return None
    if device == "cpu":
        return kernels.CPU if widths[0] == widths[1] else None
    if device != "cuda":
        return None
    half, modern = q.dtype in (torch.bfloat16, torch.float16), kernels.is_ampere(q.device)
    # Of unequal lengths its causal mask begins at the other corner.
    corner = not causal or q.shape[-2] == k.shape[-2]
    if half and modern and mask is None and corner and widths[0] == widths[1] <= 256 and widths[0] % 8 == 0:
        return kernels.FLASH
    narrow = q.dtype == torch.float32 or (half and (modern or q.dtype == torch.float16))
    return kernels.EFFICIENT if narrow and all(width % (8 if half else 4) == 0 for width in widths) else None


def additive(mask: Tensor, q: Tensor) -> Tensor:
    """The mask as what is added to the scores, in the query's dtype and with four dimensions."""
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
    else:
        bias = mask.to(q.dtype)
    return bias.view(*[1] * (4 - bias.dim()), *bias.shape)


def rows(x: Tensor) -> Tensor:
    """With its last dimension contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def repeated(q: Tensor, k: Tensor) -> Tensor:
    """Key or value heads repeated for the query heads that share them."""
    groups = q.shape[-3] // k.shape[-3] if q.dim() > 2 else 1
    return k if groups == 1 else k.repeat_interleave(groups, -3)


def folded(gradient: Tensor, k: Tensor) -> Tensor:
    """Gradients of repeated heads summed."""
    if gradient.shape == k.shape:
        return gradient
    groups = gradient.shape[-3] // k.shape[-3]
    return gradient.unflatten(-3, (k.shape[-3], groups)).sum(-3)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    wide = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
    scores = (q @ k.transpose(-2, -1)).to(wide) * scale
    if causal:
        late = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(late, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores.add_(mask)
    return scores


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float):
    scores = _scores(q, k, mask, causal, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp_()
    # A row without anything to attend to: -inf - -inf.
    weights = weights.nan_to_num_(0.0) if mask is not None else weights
    return weights.to(v.dtype) @ v, lse


def _reference_backward(grad, q, k, v, mask, out, lse, causal, scale):  # type: ignore[no-untyped-def]
    scores = _scores(q, k, mask, causal, scale)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    weights = weights.nan_to_num_(0.0) if mask is not None else weights
    dv = weights.to(grad.dtype).transpose(-2, -1) @ grad
    inner = (grad @ v.transpose(-2, -1)).to(weights.dtype)
    inner.sub_((grad * out).sum(-1, keepdim=True).to(weights.dtype))
    scores = (weights.mul_(inner) * scale).to(q.dtype)
    return scores @ k, scores.transpose(-2, -1) @ q, dv
