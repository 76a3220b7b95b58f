"""ResNet-50: a convolution of 7 x 7, 16 bottlenecks in four stages, and 1000 classes, as torchvision builds it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from actstore.bench.workloads.resnet import Residual, shortcut
from actstore.bench.workloads.workload import Workload

CHANNELS, CLASSES = 3, 1000
STAGES = 3, 4, 6, 3  # bottlenecks of each
EXPANSION = 4  # channels that a bottleneck returns, as a multiple of those of its convolution of 3 x 3


class Bottleneck(nn.Module):
    """Three convolutions, of 1 x 1, 3 x 3 and 1 x 1, each with a batch norm, and a residual connection."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.around = shortcut(channels, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(self.conv1(x)))
        h = self.relu(self.norm2(self.conv2(h)))
        out: Tensor = self.relu(self.norm3(self.conv3(h)) + self.around(x))
        return out


class ResNet50(Residual):
    """A ResNet-50. A stage has at most `work.layers` bottlenecks."""

    def __init__(self, work: Workload) -> None:
        stem = nn.Sequential(
            nn.Conv2d(CHANNELS, work.width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(work.width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        channels = EXPANSION * work.width << len(STAGES) - 1
        super().__init__(stem, _blocks(work.width, work.layers), channels, CLASSES)


def _blocks(width: int, layers: int) -> Iterator[Bottleneck]:
    channels = width
    for stage, count in enumerate(STAGES):
        for layer in range(min(count, layers)):
            yield Bottleneck(channels, width << stage, 2 if stage and not layer else 1)
            channels = EXPANSION * width << stage
