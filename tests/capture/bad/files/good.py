"""Factories that can be found, called rightly and wrongly."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int, depth: int = 1):
        super().__init__()
        if width % 2:
            raise ValueError(f"width must be even, not {width}")  # ODD
        self.layers = nn.ModuleList(nn.Linear(4 if k == 0 else width, width) for k in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x, y):
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(self.head(x), y)


class Outputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


def number():
    return 3


def nothing():
    Net(4)


def any_options(**options):
    return Net(**options)  # CALL


def checks_weights():
    model = Net(4)
    if model.head.weight.abs().max() > 100:
        raise ValueError("the weights are too large")
    return model


def loss(outputs, batch, scale=1.0):
    return F.mse_loss(outputs, batch["y"]) * scale


def loss_with_metric(outputs, batch):
    return {"loss": F.mse_loss(outputs, batch["y"]), "mean": outputs.mean()}


def loss_of_one(outputs):
    return outputs.sum()


def loss_of_wrong_key(outputs, batch):
    return F.mse_loss(outputs, batch["labels"])  # KEY


def loss_of_each(outputs, batch):
    return (outputs - batch["y"]) ** 2


WIDTH = torch.tensor(4)
