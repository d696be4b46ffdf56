"""Low-rank adapters on a frozen Llama: a few small matrices learn, everything else stays as it is."""
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsl_examples.models.llama import Llama


class LoRALinear(nn.Module):
    """A linear layer, plus `scale * up @ down` of rank `rank` beside it. Starts equal to the layer alone."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float):
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.drop = nn.Dropout(dropout)
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.empty(base.out_features, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(self.drop(x), self.down), self.up)


class LoRALlama(Llama):
    """A Llama (all of `sizes` are its own) in which only adapters on the attention layers named in `targets` learn."""

    def __init__(
        self,
        rank: int = 4,
        alpha: float = 8.0,
        dropout: float = 0.0,
        targets: Sequence[str] = ("wq", "wv"),
        **sizes,
    ):
        super().__init__(**sizes)
        self.requires_grad_(False)
        for layer in self.layers:
            for name in targets:
                setattr(layer.attn, name, LoRALinear(getattr(layer.attn, name), rank, alpha, dropout))
