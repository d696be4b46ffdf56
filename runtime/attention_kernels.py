"""torch's attention kernels, each as a forward with log-sum-exp and a backward from it, without dropout.

Shapes: query [b, h, s, d], key and value [b, h, t, d], bias (added to the scores) broadcast to [b, h, s, t].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

_aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """`forward(q, k, v, bias, causal, scale)` gives (out, lse), `backward(grad, q, k, v, bias, out, lse, causal, scale)`
    (dq, dk, dv). `shares_heads`: key and value may have fewer heads than the query."""

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    shares_heads: bool = False


@cache
def is_ampere(device: torch.device) -> bool:
    """Whether the device can run flash attention and bfloat16 (compute capability 8.0); data sheets' devices can."""
    return device.type == "meta" or torch.cuda.get_device_capability(device) >= (8, 0)


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


def _cpu_backward(grad, q, k, v, bias, out, lse, causal, scale):  # type: ignore[no-untyped-def]
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _flash_backward(grad, q, k, v, bias, out, lse, causal, scale):  # type: ignore[no-untyped-def]
    # No lengths of packed sequences, and no state of dropout: the forward of one dense batch returns none either.
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, causal, _nothing(q), _nothing(q), scale=scale
    )


LSE_ALIGNMENT, BIAS_ALIGNMENT = 32, 8
"""What the memory-efficient kernel reads its log-sum-exps and the rows of its bias in multiples of."""


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    given = _aligned(bias, q, k)
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, given, True, 0.0, causal, scale=scale)
    return out, lse.narrow(-1, 0, q.shape[-2])


def _efficient_backward(grad, q, k, v, bias, out, lse, causal, scale):  # type: ignore[no-untyped-def]
    lse = pad(lse, (0, -lse.shape[-1] % LSE_ALIGNMENT), value=float("inf")).contiguous()
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _aligned(bias, q, k), out, lse, _nothing(q), _nothing(q), 0.0, [True, True, True, False], causal,
        scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias of all scores, with rows that begin at multiples of the alignment."""
    if bias is None:
        return None
    length = k.shape[-2]
    bias = bias.expand(*bias.shape[:-1], length)
    missing = -length % BIAS_ALIGNMENT
    if missing or bias.stride(-1) != 1:
        bias = pad(bias, (0, missing)).narrow(-1, 0, length)
    return bias.expand(*q.shape[:-1], length)


def _nothing(q: Tensor) -> Tensor:
    return torch.empty(0, device=q.device, dtype=torch.int64)


CPU = Kernel("cpu flash", _cpu, _cpu_backward)
FLASH = Kernel("flash", _flash, _flash_backward, shares_heads=True)
EFFICIENT = Kernel("memory-efficient", _efficient, _efficient_backward)
