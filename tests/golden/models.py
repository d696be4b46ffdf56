"""The small models of the golden plans. Their printed graphs are the goldens, so change them with care."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Three equal layers: the first needs no gradient of its input, the other two share their code."""

    def __init__(self, dim: int = 8, classes: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.cross_entropy(self.head(x), labels)


class BatchNorm(nn.Module):
    """A batch statistic between two layers, and a metric."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.first = nn.Linear(dim, dim, bias=False)
        self.norm = nn.BatchNorm1d(dim)
        self.head = nn.Linear(dim, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = self.head(torch.relu(self.norm(self.first(x)))).squeeze(1)
        return {"loss": F.mse_loss(found, y), "mean": found.mean()}
