"""A small residual network with batch normalization, whose statistics run over the whole batch."""
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = conv3x3(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv3x3(outputs, outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """`blocks[i]` basic blocks in stage `i`, whose channels double and whose resolution halves from stage to stage.

    `forward(images, labels)` is the mean loss over the batch.
    """

    def __init__(self, blocks: Sequence[int] = (2, 2), width: int = 16, channels: int = 3, classes: int = 10):
        super().__init__()
        self.stem = nn.Sequential(
            conv3x3(channels, width),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        self.stages = nn.ModuleList()
        inputs = width
        for stage, count in enumerate(blocks):
            outputs = width * 2**stage
            strides = [1 if stage == 0 else 2] + [1] * (count - 1)
            layers = []
            for stride in strides:
                layers.append(BasicBlock(inputs, outputs, stride))
                inputs = outputs
            self.stages.append(nn.Sequential(*layers))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.head(self.pool(x).flatten(1)), labels)
