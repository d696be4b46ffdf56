"""A vision transformer: patches by convolution, a class token, and the accuracy as a metric beside the loss."""
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """`forward(images, labels)` gives `{"loss", "accuracy"}`, both means over the batch."""

    def __init__(
        self,
        layers: int = 4,
        dim: int = 64,
        heads: int = 4,
        image: int = 32,
        patch: int = 8,
        channels: int = 3,
        classes: int = 10,
        label_smoothing: float = 0.0,
    ):
        super().__init__()
        self.label_smoothing = label_smoothing
        self.patches = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, dim))
        self.positions = nn.Parameter(torch.empty(1, 1 + (image // patch) ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.class_token, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, 0]))
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        accuracy = (logits.argmax(dim=-1) == labels).float().mean()
        return {"loss": loss, "accuracy": accuracy}
