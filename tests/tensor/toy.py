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


class Normed(nn.Module):
    """Attention whose queries and keys are normalised by head (Dehghani et al. 2023, https://arxiv.org/abs/2302.05442),
    with biases everywhere and dropout inside and outside of what is cut."""

    def __init__(self, dim: int, heads: int, kv_heads: int, dropout: float):
        super().__init__()
        self.width = dim // heads
        self.norm, self.dropout = nn.LayerNorm(dim), dropout
        self.q, self.k, self.v = nn.Linear(dim, dim), *(nn.Linear(dim, kv_heads * self.width) for _ in range(2))
        self.q_norm, self.k_norm = nn.RMSNorm(self.width), nn.RMSNorm(self.width)
        self.o, self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        # The keys come first: no one else has asked for the whole activation yet.
        k, v, q = (w(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for w in (self.k, self.v, self.q))
        p = self.dropout if self.training else 0.0
        a = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True, dropout_p=p, enable_gqa=True)
        x = x + F.dropout(self.o(F.dropout(a.transpose(1, 2).flatten(2), p)), p)
        return x + F.dropout(self.down(F.dropout(F.gelu(self.up(x)), p)), p)


class NormedModel(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 4, kv_heads: int = 2, dropout: float = 0.0, vocab: int = 21):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=3)
        self.layers = nn.ModuleList(Normed(dim, heads, kv_heads, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=True)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return smoothed(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Channels(nn.Module):
    """Convolutions: plain, in groups, and depthwise, over channels that are cut."""

    def __init__(self, channels: int = 8, groups: int = 4, classes: int = 5):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.depth = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.group = nn.Conv2d(channels, 2 * channels, 3, padding=1, groups=groups)
        self.last = nn.Conv2d(2 * channels, channels, 1)
        self.out = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.group(F.relu(self.depth(F.relu(self.first(images))))))
        return F.cross_entropy(self.out(F.relu(self.last(x)).mean((2, 3))), labels)
