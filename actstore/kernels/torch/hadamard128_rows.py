"""Rows that differ in scale under hadamard128, around the kernels of each device. The bytes: csrc/hadamard128.md."""

from __future__ import annotations

import torch

from actstore.kernels.base import Bound, Kernels, round_up, storage_slice
from actstore.kernels.torch.groups import INF, store

TINY = 0x0F800000  # 2^-96, bits of a float32
LEAST_NORMAL = 0x00800000  # bits of a float32
EXPONENTS = -96, 126  # of rows: those for which 2^-e is a normal float32


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
