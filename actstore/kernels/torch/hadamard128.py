"""hadamard128 as PyTorch operations, for devices without a kernel, and rows that differ in scale, for all devices.

The bytes: csrc/hadamard128.md.
"""

from __future__ import annotations

import torch

from actstore.kernels.base import Bound, Inner, Kernels, round_up, storage_slice
from actstore.kernels.hadamard128 import ROTATION_NUMEL, around
from actstore.kernels.torch.groups import INF, chunks, grouped, store
from actstore.kernels.torch.philox import philox

TINY = 0x0F800000  # 2^-96, bits of a float32
LEAST_NORMAL = 0x00800000  # bits of a float32
EXPONENTS = -96, 126  # of rows: those for which 2^-e is a normal float32
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


def in_rows(kernels: Kernels, nbytes: int, numel: int, width: int) -> tuple[Bound, Bound]:
    """Return both directions for a tensor of rows of `width` elements, as functions of a source, a target and the key.

    Parameters
    ----------
    kernels : for float32
    nbytes : of their payload of `numel` elements
    """
    rows, start = numel // width, round_up(nbytes)

    def encode(src: torch.Tensor, out: torch.Tensor, key: int) -> None:
        elements = storage_slice(src, 0, numel).view(rows, width).to(torch.float32)
        magnitudes = elements.view(torch.int32) & 0x7FFFFFFF
        top = torch.where(magnitudes < INF, magnitudes, 0).amax(1, keepdim=True)
        exponents = ((top >> 23) - 127).clamp(*EXPONENTS)
        scaled = torch.where(magnitudes < TINY, 0, elements).mul_(_power(-exponents))
        kernels.encode(scaled, out[:nbytes], numel, key)
        out[nbytes:start].zero_()
        out[start : start + rows] = exponents.view(-1).to(torch.int8).view(torch.uint8)

    def decode(buf: torch.Tensor, out: torch.Tensor, key: int) -> None:
        values = torch.empty(rows, width, dtype=torch.float32, device=out.device)
        kernels.decode(buf[:nbytes], values, numel, key)
        missing = values.isnan()
        exponents = buf[start : start + rows].view(torch.int8).to(torch.int32).view(-1, 1)
        values *= _power(exponents)
        values.masked_fill_(values.view(torch.int32) & 0x7FFFFFFF < LEAST_NORMAL, 0)
        store(values, missing, storage_slice(out, 0, numel))

    return encode, decode


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """Return powers of two as float32."""
    return ((exponents + 127) << 23).view(torch.float32)
