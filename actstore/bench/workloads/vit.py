"""A vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actstore.bench.workloads import digits
from actstore.bench.workloads.digits import CLASSES, Digits
from actstore.bench.workloads.gpt import Block
from actstore.bench.workloads.job import PARTS, Kind, in_blocks
from actstore.bench.workloads.workload import Workload
from actstore.errors import ConfigError

PATCH_PIXELS = 4  # side of a patch, in pixels


class ViT(nn.Module):
    """A vision transformer: ``model(images, digits)`` is the mean cross entropy of classifying the digits."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, work.width, PATCH_PIXELS, PATCH_PIXELS)
        self.first = nn.Parameter(torch.zeros(1, 1, work.width))  # class token, from which the head reads
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (work.context // PATCH_PIXELS) ** 2, work.width))
        self.blocks = nn.ModuleList(Block(work, causal=False) for _ in range(work.layers))
        self.norm = nn.LayerNorm(work.width)
        self.head = nn.Linear(work.width, CLASSES)

    def forward(self, images: Tensor, digits: Tensor) -> Tensor:
        h = self.patches(images).flatten(2).transpose(1, 2)
        h = torch.cat((self.first.expand(len(h), -1, -1), h), 1) + self.positions
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h[:, 0])), digits)


def check(work: Workload) -> None:
    """Raise ConfigError where the digits are not installed, or a patch does not divide the side."""
    digits.check(work)
    if work.context % PATCH_PIXELS:
        raise ConfigError(f"--context {work.context}: a side of an image must be a multiple of {PATCH_PIXELS} pixels.")


KIND = Kind(
    title="a vision transformer on handwritten digits",
    default=Workload("vit", layers=6, width=192, heads=3, context=32, batch=32),
    uses=("layers", "width", "heads", "context", "batch", "dropout"),
    make=in_blocks(ViT, Digits),
    check=check,
    policies=PARTS,
)
