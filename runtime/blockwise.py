"""Attention block by block: what a part of the queries sees of a part of the keys, merged by log-sum-exps.

Each block is a kernel's output with its log-sum-exp. Two outputs of one query over different keys are merged as

    lse = log(exp(lse1) + exp(lse2)),    out = out1 exp(lse1 - lse) + out2 exp(lse2 - lse)

(Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867) in float32 or higher, with the larger one taken out of
the exponentials, so that it neither overflows nor loses more with more blocks. Backward, a block's gradients follow
from the whole row's output and log-sum-exp (Dao et al. 2022, https://arxiv.org/abs/2205.14135).

Shapes: q [..., h, s, d], k and v [..., h_kv, t, d or e], lse [..., h, s].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.attention import attention, attention_backward, folded, repeated
from runtime.blocks import Block


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which partial results are merged."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@dataclass(frozen=True)
class Scores:
    """What decides about the weight of a pair of positions besides query and key.

    `mask`: bool or to be added, [..., s, t] with the local rows and all columns; `documents`: int64[rows of the batch,
    positions] of the whole sequence. `keep(rows, columns)`: which weights survive dropout with probability `p`, for
    local rows and positions of keys.
    """

    causal: bool
    window: int | None
    scale: float
    mask: Tensor | None = None
    documents: Tensor | None = None
    p: float = 0.0
    keep: Callable[[slice, slice], Tensor] | None = None

    def seen(self, block: Block, device: torch.device) -> Tensor | None:
        """What the queries of a block see of its keys, as booleans or numbers to be added."""
        allowed: Tensor | None = None
        rows = torch.arange(block.q_at, block.q_at + block.rows, device=device)[:, None]
        columns = torch.arange(block.k_at, block.k_at + block.columns, device=device)
        if self.causal:
            allowed = columns <= rows
        if self.window is not None:
            near = columns > rows - self.window
            allowed = near if allowed is None else allowed & near
        if self.documents is not None:
            query = self.documents[..., block.q_at : block.q_at + block.rows, None]
            same = (query == self.documents[..., None, block.k_at : block.k_at + block.columns]).unsqueeze(-3)
            allowed = same if allowed is None else allowed & same
        mask = self.part(block)
        if mask is None:
            return allowed
        if allowed is None:
            return mask
        return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, float("-inf"))

    def part(self, block: Block) -> Tensor | None:
        """The mask's part for a block."""
        if self.mask is None:
            return None
        mask = self.mask
        if mask.shape[-2] > 1:
            mask = mask[..., block.q : block.q + block.rows, :]
        return mask[..., block.k_at : block.k_at + block.columns] if mask.shape[-1] > 1 else mask

    def kept(self, block: Block, dtype: torch.dtype) -> Tensor | None:
        """Factors of the weights of a block: 0 for those that are dropped."""
        if self.keep is None:
            return None
        rows, columns = slice(block.q, block.q + block.rows), slice(block.k_at, block.k_at + block.columns)
        return self.keep(rows, columns).to(dtype).mul_(1.0 / (1.0 - self.p))


class Forward:
    """Queries of one rank while the keys come block by block."""

    def __init__(self, q: Tensor, e: int, scores: Scores):
        self.q, self.scores = q, scores
        self.out = q.new_zeros((*q.shape[:-1], e), dtype=wide(q.dtype))
        self.lse = q.new_full(q.shape[:-1], float("-inf"), dtype=wide(q.dtype))

    def add(self, k: Tensor, v: Tensor, blocks: Sequence[Block]) -> None:
        """Take in the blocks of these keys."""
        for block in blocks:
            q = self.q.narrow(-2, block.q, block.rows)
            part = k.narrow(-2, block.k, block.columns), v.narrow(-2, block.k, block.columns)
            if block.kind == "some":
                out, lse = _masked(q, *part, self.scores, block)
            else:
                out, lse = attention(q, *part, None, block.kind == "causal", self.scores.scale)
            merge(self.out.narrow(-2, block.q, block.rows), self.lse.narrow(-1, block.q, block.rows), out, lse)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge the output of further keys into `out` and `lse`, in place."""
    more_lse = more_lse.to(lse.dtype)
    largest = torch.maximum(lse, more_lse)
    largest = largest.masked_fill(largest == float("-inf"), 0.0)  # neither has seen anything
    old, new = (lse - largest).exp_(), (more_lse - largest).exp_()
    total = old + new
    share = torch.where(total > 0, 1.0 / total, 0.0)
    out.mul_((old * share).unsqueeze(-1)).add_(more.to(out.dtype) * (new * share).unsqueeze(-1))
    lse.copy_(total.log_().add_(largest))


class Backward:
    """Gradients of one rank's queries, and of the keys that come by. `dmask`: where that of the mask is summed."""

    def __init__(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, scores: Scores, dmask: Tensor | None = None
    ):  # fmt: skip
        self.grad, self.q, self.out, self.lse, self.scores, self.dmask = grad, q, out, lse, scores, dmask
        self.dq = torch.zeros_like(q, dtype=wide(q.dtype))

    def add(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, blocks: Sequence[Block]) -> None:
        """Add the gradients of these keys' blocks to `dk` and `dv` (wide) and to those of the queries."""
        for block in blocks:
            rows = [x.narrow(-2, block.q, block.rows) for x in (self.grad, self.q, self.out)]
            part = [x.narrow(-2, block.k, block.columns) for x in (k, v)]
            lse = self.lse.narrow(-1, block.q, block.rows)
            if block.kind == "some":
                found = _masked_backward(*rows, lse, *part, self.scores, block, self.dmask)
            else:
                grad, q, out = (x.contiguous() for x in rows)
                found = attention_backward(
                    grad, q, *part, None, out, lse.contiguous(), block.kind == "causal", self.scores.scale
                )
            self.dq.narrow(-2, block.q, block.rows).add_(found[0])
            dk.narrow(-2, block.k, block.columns).add_(found[1])
            dv.narrow(-2, block.k, block.columns).add_(found[2])


def _weights(q: Tensor, k: Tensor, scores: Scores, block: Block) -> Tensor:
    """The scores of a block, in the merging dtype; -inf where nothing is seen."""
    found = (q @ k.transpose(-2, -1)).to(wide(q.dtype)) * scores.scale
    seen = scores.seen(block, q.device)
    if seen is None:
        return found
    return found.masked_fill_(~seen, float("-inf")) if seen.dtype == torch.bool else found.add_(seen)


def _masked(q: Tensor, k: Tensor, v: Tensor, scores: Scores, block: Block) -> tuple[Tensor, Tensor]:
    k, v = repeated(q, k), repeated(q, v)
    weights = _weights(q, k, scores, block)
    lse = weights.logsumexp(-1)
    weights = (weights - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp_()
    kept = scores.kept(block, weights.dtype)
    if kept is not None:
        weights = weights * kept
    return weights.to(v.dtype) @ v, lse


def _masked_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, scores: Scores, block: Block,
    dmask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kk, vv = repeated(q, k), repeated(q, v)
    weights = _weights(q, kk, scores, block)
    weights = weights.sub_(lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp_()
    kept = scores.kept(block, weights.dtype)
    dropped = weights if kept is None else weights * kept
    dv = dropped.to(grad.dtype).transpose(-2, -1) @ grad
    inner = (grad @ vv.transpose(-2, -1)).to(weights.dtype)
    if kept is not None:
        inner = inner * kept
    inner = inner.sub_((grad * out).sum(-1, keepdim=True).to(weights.dtype)).mul_(weights)
    if dmask is not None:
        part = Scores(False, None, 1.0, dmask).part(block)
        assert part is not None
        part.add_(_summed(inner, part.shape))
    inner = (inner * scores.scale).to(q.dtype)
    return inner @ kk, folded(inner.transpose(-2, -1) @ q, k), folded(dv, v)


def _summed(x: Tensor, shape: torch.Size) -> Tensor:
    """Summed over what a tensor of this shape was broadcast along."""
    x = x.sum(tuple(range(x.dim() - len(shape)))) if x.dim() > len(shape) else x
    dims = [dim for dim, size in enumerate(shape) if size == 1 and x.shape[dim] != 1]
    return x.sum(dims, keepdim=True) if dims else x
