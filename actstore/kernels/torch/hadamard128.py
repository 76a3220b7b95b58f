"""hadamard128 as PyTorch operations, for devices without a kernel. The bytes: csrc/hadamard128.md."""

from __future__ import annotations

import torch

from actstore.kernels.base import Inner, Kernels, storage_slice
from actstore.kernels.hadamard128 import ROTATION_NUMEL, around
from actstore.kernels.torch.groups import INF, chunks, grouped, store
from actstore.kernels.torch.philox import philox

TINY = 0x0F800000  # 2^-96
FACTOR = 2.0**-3.5


def kernels(dtype: torch.dtype, device: torch.device, inner: Inner) -> Kernels:
    """Return the kernels for one dtype, around those of the inner codec.

    They allocate temporaries and never wait for the device.
    """

    def forward(src: torch.Tensor, scratch: torch.Tensor, numel: int, key: int) -> None:
        for start, count in chunks(numel):
            values = grouped(storage_slice(src, start, count).to(torch.float32), ROTATION_NUMEL)
            found, missing = _transform(values * _signs(key, device))
            scratch[start : start + found.numel()] = found.masked_fill_(missing, torch.nan).view(-1)

    def inverse(scratch: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        for start, count in chunks(numel):
            values = grouped(scratch[start : start + -(-count // ROTATION_NUMEL) * ROTATION_NUMEL], ROTATION_NUMEL)
            found, missing = _transform(values)
            store(found * _signs(key, device), missing.expand_as(found), storage_slice(out, start, count))

    return around(inner.kernels("torch", torch.float32, device), device, forward, inverse)


def _signs(key: int, device: torch.device) -> torch.Tensor:
    """Draw 128 signs, +1 or -1, float32."""
    words = philox(torch.zeros(1, dtype=torch.int64, device=device), 1, key).view(4, 1)
    bits = words >> torch.arange(32, device=device) & 1
    return (1 - 2 * bits).view(ROTATION_NUMEL).to(torch.float32)


def _transform(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the Walsh-Hadamard transform of float32 (groups, 128), times 2**-3.5, and mark groups not finite."""
    tiny = (values.view(torch.int32) & 0x7FFFFFFF) < TINY
    found = torch.where(tiny, 0, values) * FACTOR
    half = ROTATION_NUMEL // 2
    while half:
        pairs = found.view(-1, ROTATION_NUMEL // half // 2, 2, half)
        found = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        half //= 2
    found = found.view(-1, ROTATION_NUMEL)
    missing = (found.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True) >= INF
    return found, missing
