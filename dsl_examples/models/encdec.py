"""An encoder-decoder transformer: every decoder layer attends to the one encoder output, padding left out."""
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sinusoids(length: int, dim: int) -> Tensor:
    """The fixed position table of the original transformer, `[length, dim]`."""
    frequencies = 10_000.0 ** -(torch.arange(0, dim, 2) / dim)
    angles = torch.outer(torch.arange(length).to(frequencies.dtype), frequencies)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q, k, v = (
            project(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project, y in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class EncoderLayer(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = FeedForward(dim, hidden)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, mask=mask)
        return x + self.mlp(self.norm2(x))


class DecoderLayer(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.attn = Attention(dim, heads)
        self.cross = Attention(dim, heads)
        self.mlp = FeedForward(dim, hidden)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, causal=True)
        x = x + self.cross(self.norm2(x), memory, mask=memory_mask)
        return x + self.mlp(self.norm3(x))


class EncoderDecoder(nn.Module):
    """`forward(source, target, labels)` is the mean loss over the labels that are not -100.

    `target` is the output shifted right (it starts with a begin token); `source` holds `padding` after its end.
    """

    def __init__(
        self,
        layers: int = 2,
        dim: int = 64,
        heads: int = 4,
        vocab: int = 256,
        hidden: int | None = None,
        context: int = 256,
        padding: int = 0,
    ):
        super().__init__()
        hidden = hidden or 4 * dim
        self.padding = padding
        self.source_embed = nn.Embedding(vocab, dim, padding_idx=padding)
        self.target_embed = nn.Embedding(vocab, dim)
        self.encoder = nn.ModuleList(EncoderLayer(dim, heads, hidden) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(dim)
        self.decoder = nn.ModuleList(DecoderLayer(dim, heads, hidden) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)
        self.register_buffer("positions", sinusoids(context, dim), persistent=False)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        mask = source.ne(self.padding)[:, None, None, :]
        memory = self.with_positions(self.source_embed(source))
        for layer in self.encoder:
            memory = layer(memory, mask)
        memory = self.encoder_norm(memory)

        x = self.with_positions(self.target_embed(target))
        for layer in self.decoder:
            x = layer(x, memory, mask)
        logits = self.head(self.decoder_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def with_positions(self, x: Tensor) -> Tensor:
        """`[batch, length, dim]` plus the table, in the dtype of `x`."""
        return x + self.positions[: x.shape[1]].to(x.dtype)
