"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotary_cache(context: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles, each `[context, head_dim / 2]`."""
    frequencies = base ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(context).to(frequencies.dtype), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of each head of `x` (`[batch, heads, seq, head_dim]`) by the angles, in their dtype."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def within_documents(documents: Tensor) -> tuple[Tensor, Tensor]:
    """(the place of each token in its document, the mask [batch, 1, seq, seq] of what its query sees)."""
    at = torch.arange(documents.shape[1], device=documents.device)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    positions = at - torch.where(begins, at, 0).cummax(-1).values
    mask = (documents[:, :, None] == documents[:, None, :]) & (at[:, None] >= at)
    return positions, mask[:, None]


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_dim = dim // heads
        self.grouped = kv_heads != heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=self.grouped)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.attn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attn = Attention(dim, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(dim, eps=1e-5)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin, mask)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """`forward(tokens, labels)` is the mean loss over the labels that are not -100. With `documents`, int64[batch, seq],
    several are packed in a row: attention stays within each, and positions restart.

    `hidden` is by default two thirds of `4 * dim`, rounded up to a multiple of 32; `kv_heads` is by default `heads`.
    """

    def __init__(
        self,
        layers: int = 4,
        dim: int = 128,
        heads: int = 4,
        kv_heads: int | None = None,
        vocab: int = 256,
        hidden: int | None = None,
        context: int = 2048,
        rope_base: float = 10_000.0,
    ):
        super().__init__()
        kv_heads = kv_heads or heads
        hidden = hidden or -(-8 * dim // 3 // 32) * 32
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab, bias=False)
        cos, sin = rotary_cache(context, dim // heads, rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        cos, sin, mask = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]], None
        if documents is not None:
            positions, mask = within_documents(documents)
            cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
