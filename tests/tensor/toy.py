"""Small models that each show one hard layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy with the square of the log-sum-exp added (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311)."""
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED)
    return loss + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=0.1)


def likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, -1), labels, ignore_index=IGNORED)


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    valid = labels != IGNORED
    chosen = logits.gather(-1, labels.masked_fill(~valid, 0).unsqueeze(-1)).squeeze(-1)
    each = torch.logsumexp(logits, -1) - chosen
    return (each * valid).sum() / valid.sum()


def smoothed_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    logs = logits.log_softmax(-1)
    valid = labels != IGNORED
    each = -0.9 * logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) - 0.1 * logs.mean(-1)
    return (each * valid).sum() / valid.sum()


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    p = logits.softmax(-1)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED) - 0.1 * (p * logits.log_softmax(-1)).sum(-1).mean()


LOSSES = {item.__name__: item for item in (z_loss, smoothed, likelihood, by_hand, smoothed_by_hand, entropy)}


class Head(nn.Module):
    """Tokens to logits over a vocabulary, and one of the losses above."""

    def __init__(self, loss: str, vocab: int = 24, dim: int = 16, bias: bool = False):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab, bias=bias)
        self.loss = LOSSES[loss]

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.mix(self.embed(tokens))))
        return self.loss(logits.flatten(0, 1), labels.flatten())
