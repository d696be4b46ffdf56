"""Attention with its log-sum-exp: one operator, the kernel that the device has.

Shapes: query [..., h, s, d], key and value [..., h_kv, t, d] with h a multiple of h_kv; out like query, lse [..., h, s]
in float32 (float64 for float64). `mask` is bool (True: may attend) or additive, broadcast to [..., h, s, t].
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.devices import kind_of

_CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_CUDA_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
_CUDA_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float):
    """(out, lse). Rows that may attend to nothing give zeros and an lse of -inf."""
    kernel = _kernel(q, k, v, mask)
    if kernel == "cpu":
        k, v = repeated(q, k), repeated(q, v)
        return _CPU_FLASH(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if kernel == "cuda":
        out, lse = _CUDA_FLASH(q, repeated(q, k), repeated(q, v), 0.0, causal, False, scale=scale)[:2]
        return out, lse
    return _reference(q, repeated(q, k), repeated(q, v), mask, causal, scale)


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v (Dao et al. 2022, https://arxiv.org/abs/2205.14135: from the log-sum-exp, without the
    attention weights of the forward)."""
    kernel = _kernel(q, k, v, mask)
    kk, vv = repeated(q, k), repeated(q, v)
    if kernel == "cpu":
        dq, dk, dv = _CPU_FLASH_BACKWARD(grad, q, kk, vv, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    elif kernel == "cuda":
        nothing = torch.empty(0, device=q.device, dtype=torch.int64)
        dq, dk, dv = _CUDA_FLASH_BACKWARD(
            grad, q, kk, vv, out, lse, nothing, nothing, q.shape[-2], k.shape[-2], 0.0, causal, nothing, nothing,
            scale=scale,
        )  # fmt: skip
    else:
        dq, dk, dv = _reference_backward(grad, q, kk, vv, mask, out, lse, causal, scale)
    return dq, folded(dk, k), folded(dv, v)


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    device = kind_of(q.device)
    plain = q.dim() == 4 and q.shape[-1] == v.shape[-1] and 0 not in q.shape and 0 not in k.shape
    if plain and device == "cpu" and mask is None:
        return "cpu"
    half = q.dtype in (torch.bfloat16, torch.float16)
    if plain and device == "cuda" and mask is None and half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return "cuda"
    return "reference"


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
