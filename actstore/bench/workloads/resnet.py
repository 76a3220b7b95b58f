"""ResNet for small images: three stages of basic blocks, each half as large and twice as wide as the one before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from actstore.bench.workloads import digits
from actstore.bench.workloads.digits import CLASSES, Digits
from actstore.bench.workloads.job import Kind, in_blocks
from actstore.bench.workloads.workload import Workload

STAGES = 3


def shortcut(channels: int, out: int, stride: int) -> nn.Module:
    """Return the way around a block: a projection where its output has another shape than its input."""
    if stride == 1 and channels == out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))


class Block(nn.Module):
    """A basic block: two convolutions and a residual connection."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.around = shortcut(channels, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        out: Tensor = self.relu(h + self.around(x))
        return out


class Residual(nn.Module):
    """A residual network: ``model(images, labels)`` is the mean cross entropy of classifying the images.

    Parameters
    ----------
    channels : those that the last block returns
    """

    def __init__(self, stem: nn.Module, blocks: Iterable[nn.Module], channels: int, classes: int) -> None:
        super().__init__()
        self.stem, self.blocks = stem, nn.ModuleList(blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        h = self.stem(images)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h.mean((2, 3))), labels)


class ResNet(Residual):
    """A ResNet for digits."""

    def __init__(self, work: Workload) -> None:
        stem = nn.Sequential(
            nn.Conv2d(1, work.width, 3, padding=1, bias=False), nn.BatchNorm2d(work.width), nn.ReLU(inplace=True)
        )
        super().__init__(stem, _blocks(work.width, work.layers), work.width << (STAGES - 1), CLASSES)


def _blocks(width: int, layers: int) -> Iterator[Block]:
    channels = width
    for stage in range(STAGES):
        for layer in range(layers):
            out = width << stage
            yield Block(channels, out, 2 if stage and not layer else 1)
            channels = out


KIND = Kind(
    title="a ResNet on handwritten digits",
    default=Workload("resnet", layers=3, width=32, heads=1, context=32, batch=32),
    uses=("layers", "width", "context", "batch"),
    make=in_blocks(ResNet, Digits),
    check=digits.check,
    policies=("zmask",),
)
