"""Attention kernels: the device's give what the reference gives, masked rows too, and take what they are given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from runtime import attention as attentions
from runtime import attention_kernels as kernels
from runtime.attention import attention, attention_backward, choose
from runtime.devices import STANDS_FOR


def operands(heads: int = 4, shared: int = 2, s: int = 7, t: int = 9, d: int = 8, **options: object) -> list[Tensor]:
    return [torch.randn(2, h, n, d, **options) for h, n in ((heads, s), (shared, t), (shared, t))]  # type: ignore[arg-type]


def everything(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    out, lse = attention(q, k, v, mask, causal, 0.3)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    return [out, lse, *attention_backward(grad, q, k, v, mask, out, lse, causal, 0.3)]


MASKS = {
    "none": lambda: None,
    "padding": lambda: torch.arange(9).expand(2, 1, 1, 9) < torch.tensor([9, 4]).view(2, 1, 1, 1),
    "any": lambda: torch.rand(2, 4, 7, 9) < 0.4,
    "blind rows": lambda: torch.rand(7, 9) < torch.arange(7).view(7, 1) / 6,
    "added": lambda: torch.randn(1, 4, 7, 9, dtype=torch.float64),
    "added, blind": lambda: torch.randn(7, 9, dtype=torch.float64).masked_fill(torch.arange(7).view(7, 1) < 2, -torch.inf),
    "one column": lambda: torch.randn(2, 4, 7, 1, dtype=torch.float64),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_the_cpu_kernel_gives_what_the_reference_gives(mask: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = (*operands(dtype=torch.float64), MASKS[mask](), causal)
    found = everything(*given)
    monkeypatch.setattr(attentions, "choose", lambda *operands: None)
    for a, b in zip(found, everything(*given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.fixture
def cuda() -> Iterator[None]:
    """Tensors without data stand for those of a CUDA device."""
    token = STANDS_FOR.set("cuda")
    yield
    STANDS_FOR.reset(token)


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CHOICES = [
    ({"dtype": BF16}, False, False, kernels.FLASH),
    ({"dtype": BF16}, False, True, kernels.EFFICIENT),  # 7 queries and 9 keys
    ({"dtype": BF16, "s": 9}, False, True, kernels.FLASH),
    ({"dtype": BF16}, True, False, kernels.EFFICIENT),
    ({"dtype": FP32}, False, True, kernels.EFFICIENT),
    ({"dtype": FP32, "d": 6}, False, True, None),
    ({"dtype": BF16, "d": 4}, False, False, None),
    ({"dtype": FP64}, False, False, None),
]


@pytest.mark.parametrize(("options", "masked", "causal", "kernel"), CHOICES)
def test_cuda_kernels_take_what_they_are_given(
    options: dict, masked: bool, causal: bool, kernel: kernels.Kernel | None, cuda: None
) -> None:
    """Each operator's own check of shapes, and gradients of the shapes of what they are of: with fewer key/value heads,
    lengths that are no multiples of anything, and a mask that is broadcast."""
    q, k, v = operands(**options, device="meta")
    mask = torch.ones(2, 1, 1, k.shape[-2], dtype=torch.bool, device="meta") if masked else None
    assert choose(q, k, v, mask, causal) is kernel
    out, lse = attention(q, k, v, mask, causal, 0.3)
    assert out.shape == q.shape and lse.shape == q.shape[:-1] and lse.dtype == (FP64 if q.dtype == FP64 else FP32)
    for gradient, operand in zip(attention_backward(out, q, k, v, mask, out, lse, causal, 0.3), (q, k, v), strict=True):
        assert gradient.shape == operand.shape and gradient.dtype == operand.dtype


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_kernels_give_what_the_reference_gives(mask: str, dtype: torch.dtype, causal: bool) -> None:
    whole = [*operands(dtype=FP64), MASKS[mask]()]
    given = [x if x is None or x.dtype == torch.bool else x.to(dtype) for x in whole]
    found = everything(*(x if x is None else x.cuda() for x in given), causal)  # type: ignore[misc]
    wanted = everything(*(x if x is None or x.dtype == torch.bool else x.double() for x in given), causal)  # type: ignore[misc]
    for a, b in zip(found, wanted, strict=True):
        tolerance = 1e-3 if dtype == FP32 else 3e-2
        torch.testing.assert_close(a.double().cpu(), b, rtol=tolerance, atol=tolerance)
