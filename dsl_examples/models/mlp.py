"""A multilayer perceptron with the awkward corners of real ones: tied, shared and unused parameters."""
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Classifies `x`, and reconstructs it through the transpose of its first weight.

    - `first.weight` is used twice, the second time transposed (a tied autoencoder);
    - the one module `shared` is called once for each name in `activations`;
    - `spare` is never called, so its parameters have no gradient.

    `forward(x, labels)` is the mean classification loss plus a tenth of the mean squared reconstruction error.
    """

    def __init__(
        self,
        dim: int = 16,
        hidden: int = 32,
        classes: int = 10,
        activations: Sequence[str] = ("relu", "gelu", "silu", "tanh"),
    ):
        super().__init__()
        self.activations = tuple(activations)
        self.first = nn.Linear(dim, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in activations)
        self.shared = nn.Linear(hidden, hidden)
        self.spare = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes)
        self.offset = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.offset)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        code = self.first(x)
        h = code
        for name, layer in zip(self.activations, self.layers):
            activation = getattr(F, name)
            h = h + self.shared(activation(layer(h)))
        restored = F.linear(code, self.first.weight.t(), self.offset)
        return F.cross_entropy(self.head(h), labels) + 0.1 * F.mse_loss(restored, x)
