"""hadamard128 on every device: rotate to float32 scratch, then the inner codec, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from actstore.kernels.base import Kernels
from actstore.kernels.scratch import scratch

ROTATION_NUMEL = 128  # elements that are rotated together

Rotate = Callable[[torch.Tensor, torch.Tensor, int, int], None]


def around(inner: Kernels, device: torch.device, forward: Rotate, inverse: Rotate) -> Kernels:
    """Return kernels that call ``forward(src, scratch, numel, key)`` and ``inverse(scratch, out, numel, key)``."""

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> int | None:
        rotated = _rotated(numel, device)
        forward(src, rotated, numel, key)
        used: int | None = inner.encode(rotated, out, len(rotated), key)
        return used

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        rotated = _rotated(numel, device)
        inner.decode(buf, rotated, len(rotated), key)
        inverse(rotated, out, numel, key)

    return Kernels(encode, decode)


def _rotated(numel: int, device: torch.device) -> torch.Tensor:
    return scratch(-(-numel // ROTATION_NUMEL) * ROTATION_NUMEL, torch.float32, device)
