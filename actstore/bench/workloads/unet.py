"""U-Net that removes noise from images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actstore.bench.workloads import digits
from actstore.bench.workloads.digits import NoisyDigits
from actstore.bench.workloads.job import Job, Kind
from actstore.bench.workloads.workload import Workload
from actstore.errors import ConfigError

NORM_GROUPS = 8


class Block(nn.Module):
    """Two convolutions, each with a norm and SiLU."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(NORM_GROUPS, out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(NORM_GROUPS, out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """A U-Net: ``model(noisy, clean)`` is the mean squared error of the denoised images."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        widths = [work.width << level for level in range(work.layers)]
        self.downs = nn.ModuleList(Block(a, b) for a, b in zip([1, *widths], widths, strict=False))
        self.middle = Block(widths[-1], widths[-1])
        self.ups = nn.ModuleList(Block(2 * b, a) for a, b in zip([widths[0], *widths], widths, strict=False))[::-1]
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, noisy: Tensor, clean: Tensor) -> Tensor:
        h, skipped = noisy, []
        for down in self.downs:
            h = down(h)
            skipped.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.middle(h)
        for up, skip in zip(self.ups, reversed(skipped), strict=True):
            h = up(torch.cat((F.interpolate(h, scale_factor=2.0), skip), 1))
        return F.mse_loss(self.head(h).float(), clean)


def check(work: Workload) -> None:
    """Raise ConfigError where the digits are not installed, or the sizes cannot be halved or grouped."""
    digits.check(work)
    if work.context % (1 << work.layers):
        raise ConfigError(
            f"--context {work.context}: {work.layers} levels halve the side as many times. "
            f"Give a multiple of {1 << work.layers}."
        )
    if work.width % NORM_GROUPS:
        raise ConfigError(f"--width {work.width}: the norms take groups of channels. Give a multiple of {NORM_GROUPS}.")


def make(work: Workload) -> Job:
    model = UNet(work).to(work.device)
    return Job(work, model, [*model.downs, model.middle, *model.ups], NoisyDigits(work), chain=False)


KIND = Kind(
    title="a U-Net that takes noise off handwritten digits",
    default=Workload("unet", layers=3, width=32, heads=1, context=32, batch=48),
    uses=("layers", "width", "context", "batch"),
    make=make,
    check=check,
    policies=("downs.* : recompute; middle : recompute; ups.* : recompute",),  # "recompute" omits `middle`
)
