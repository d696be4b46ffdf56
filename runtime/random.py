"""Random bits by position: dropout that does not depend on how a plan divides the work.

The bit of an element is a hash of (seed, step, call site, the element's global index), so replicas agree, shards and
micro-batches differ, recomputation repeats it, and every plan drops the same elements as one device does. The hash is
the finaliser of SplitMix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

import torch

_WORD = (1 << 64) - 1
_GAMMA, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(word: int) -> int:
    """A 64-bit word as the int64 with the same bits."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def key(seed: int, step: int, site: int) -> int:
    """A 64-bit key, mixed so that neighbouring seeds, steps and sites have nothing in common."""
    word = 0
    for part in (seed, step, site):
        word = (word ^ part) + _GAMMA & _WORD
        word = (word ^ word >> 30) * _MIX1 & _WORD
        word = (word ^ word >> 27) * _MIX2 & _WORD
        word ^= word >> 31
    return word


def keep_mask(index: torch.Tensor, p: float, mixed_key: int) -> torch.Tensor:
    """bool tensor: which elements survive dropout with probability p. `index` is int64 and is overwritten."""

    def fold(word: torch.Tensor, bits: int) -> torch.Tensor:
        # int64 shifts are arithmetic: clear the copies of the sign.
        return word.bitwise_xor_((word >> bits).bitwise_and_((1 << (64 - bits)) - 1))

    word = index.mul_(_signed(_GAMMA)).add_(_signed(mixed_key))
    word = fold(word, 30).mul_(_signed(_MIX1))
    word = fold(word, 27).mul_(_signed(_MIX2))
    word = fold(word, 31).bitwise_and_((1 << 32) - 1)
    return word >= round(p * (1 << 32))


def global_index(positions: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """The linear index in a tensor of global `shape` of each element at these positions along each dimension."""
    index = torch.zeros((1,) * len(shape), dtype=torch.int64, device=positions[0].device if positions else None)
    stride = 1
    for dim in range(len(shape) - 1, -1, -1):
        where = positions[dim] * stride
        index = index + where.view([-1 if k == dim else 1 for k in range(len(shape))])
        stride *= shape[dim]
    return index
