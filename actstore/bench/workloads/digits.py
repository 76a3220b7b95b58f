"""Scanned handwritten digits from scikit-learn: 1,797 images of 8 by 8 pixels, enlarged to the side of the workload."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from actstore.bench.workloads.workload import Workload
from actstore.errors import ConfigError

CLASSES = 10
GREY_LEVELS = 16  # gray levels of the scans


@lru_cache(maxsize=1)
def scans() -> tuple[Tensor, Tensor]:
    """Return the images, float32 (count, 1, 8, 8) from -1 to 1, and their digits, int64 (count,).

    Raises
    ------
    ConfigError : scikit-learn is not installed
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ConfigError(
            "models of images learn scikit-learn's digits, and it is not installed. Run pip install 'actstore[bench]'."
        ) from error
    data = load_digits()
    images = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1)
    return images / (GREY_LEVELS / 2) - 1, torch.as_tensor(data.target, dtype=torch.int64)


def check(work: Workload) -> None:
    """Raise ConfigError where the digits are not installed."""
    scans()


class Digits:
    """Batches by step number, the same for every row.

    ``digits(step)`` returns images, float32 (batch, 1, context, context) from -1 to 1, and their digits,
    int64 (batch,), both on the device.
    """

    def __init__(self, work: Workload) -> None:
        self._images, self._labels = scans()
        self._work = work

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self._labels), (self._work.batch,), generator=self.generator(step))
        return self._drawn(chosen), self._labels[chosen].to(self._work.device)

    def generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._work.seed * 1_000_003 + step)

    def _drawn(self, chosen: Tensor) -> Tensor:
        size = (self._work.context, self._work.context)
        return F.interpolate(self._images[chosen], size, mode="bilinear").to(self._work.device)


class NoisyDigits(Digits):
    """Batches of images under Gaussian noise, and the clean images: ``digits(step)`` returns both.

    Each image has its own share of noise, from 0 to 1, in the variance.
    """

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        generator, count = self.generator(step), self._work.batch
        clean = self._drawn(torch.randint(len(self._labels), (count,), generator=generator))
        share = torch.rand(count, 1, 1, 1, generator=generator)
        noise = torch.randn(clean.shape, generator=generator)
        mixed = (1 - share).sqrt() * clean.cpu() + share.sqrt() * noise
        return mixed.to(self._work.device), clean
