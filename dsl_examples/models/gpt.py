"""A GPT over bytes: learned positions, LayerNorm, GELU, dropout, and optionally a head tied to the embedding."""
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Embedding):
    """An embedding that starts small, as a table that is also the output projection must."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, seq, self.heads, dim // self.heads).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            split(self.query(x)),
            split(self.key(x)),
            split(self.value(x)),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float, attention_dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, attention_dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """`forward(tokens, labels)` is the mean loss over the labels that are not -100."""

    def __init__(
        self,
        layers: int = 4,
        dim: int = 128,
        heads: int = 4,
        vocab: int = 256,
        context: int = 256,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        tied: bool = False,
    ):
        super().__init__()
        self.tokens = Embedding(vocab, dim)
        self.positions = Embedding(context, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout, attention_dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
