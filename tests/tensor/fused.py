"""Models whose projections make several things at once, of different sizes: one behind the other in one weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsl_examples.models.llama import Llama, rotate


class FusedAttention(nn.Module):
    """Queries, keys and values from one projection, taken apart as `reading` says."""

    def __init__(self, dim: int, heads: int, kv_heads: int, reading: str, bias: bool):
        super().__init__()
        self.width, self.heads, self.kv_heads, self.reading = dim // heads, heads, kv_heads, reading
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.width, bias=bias)
        self.wo = nn.Linear(dim, dim, bias=bias)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Each [batch, seq, heads, width]."""
        heads = [self.heads, self.kv_heads, self.kv_heads]
        sizes = [count * self.width for count in heads]
        if self.reading == "weights":
            biases = [None] * 3 if self.qkv.bias is None else self.qkv.bias.split(sizes)
            made = [F.linear(x, w, b) for w, b in zip(self.qkv.weight.split(sizes), biases)]
        elif self.reading == "heads":
            return self.qkv(x).unflatten(-1, (-1, self.width)).split(heads, 2)
        elif self.reading == "slices":
            fused, q, k = self.qkv(x), sizes[0], sizes[0] + sizes[1]
            made = [fused[..., :q], fused[..., q:k], fused[..., k:]]
        else:
            made = self.qkv(x).split(sizes, -1)
        return tuple(each.unflatten(-1, (-1, self.width)) for each in made)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in self.projected(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = self.heads != self.kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FusedLlama(Llama):
    """A Llama with one projection to queries, keys and values."""

    def __init__(self, dim: int, heads: int, kv_heads: int, reading: str = "split", bias: bool = False, **sizes: int):
        super().__init__(dim=dim, heads=heads, kv_heads=kv_heads, **sizes)
        for layer in self.layers:
            layer.attn = FusedAttention(dim, heads, kv_heads, reading, bias)


class Scan(nn.Module):
    """The projection of a Mamba-2 block (Dao and Gu 2024, https://arxiv.org/abs/2405.21060), with its recurrence written
    as attention that decays: [z | x | B | C | dt] in one weight, x and z of all heads, B and C of `groups`, dt of heads."""

    def __init__(self, dim: int, heads: int, groups: int, state: int):
        super().__init__()
        self.heads, self.groups, self.state, self.inner = heads, groups, state, 2 * dim
        self.sizes = [self.inner, self.inner, groups * state, groups * state, heads]
        self.norm = nn.LayerNorm(dim)
        self.in_proj = nn.Linear(dim, sum(self.sizes))
        self.out_proj = nn.Linear(self.inner, dim)

    def forward(self, u: Tensor) -> Tensor:
        z, x, b, c, dt = self.in_proj(self.norm(u)).split(self.sizes, -1)
        steps = F.softplus(dt)  # [batch, seq, heads]
        x = x.unflatten(-1, (self.heads, -1)) * steps.unsqueeze(-1)
        b, c = (each.unflatten(-1, (self.groups, -1)) for each in (b, c))
        b, c = (each.repeat_interleave(self.heads // self.groups, 2) for each in (b, c))
        past = torch.cumsum(steps, 1)
        decay = (past.unsqueeze(1) - past.unsqueeze(2)).clamp(max=0).exp()  # [batch, from, to, heads]
        seen = torch.ones(u.shape[1], u.shape[1], dtype=u.dtype, device=u.device).tril()
        scores = torch.einsum("bthn,bshn->bsth", c, b) * decay * seen.T[None, :, :, None]
        mixed = torch.einsum("bsth,bshp->bthp", scores, x).flatten(2)
        return u + self.out_proj(mixed * F.silu(z))


class ScanModel(nn.Module):
    """Two such blocks between an embedding and a head."""

    def __init__(self, dim: int = 16, heads: int = 4, groups: int = 2, state: int = 4, vocab: int = 32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Scan(dim, heads, groups, state) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
