"""int8 by token axis as PyTorch operations, for devices without a kernel. The bytes: csrc/int8_token.md."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import pad

from actstore.kernels.base import Kernels, payload_pointer, round_up, storage_slice
from actstore.kernels.torch import int8 as int8_torch
from actstore.kernels.torch.groups import CHUNK_NUMEL
from actstore.kernels.torch.philox import offsets


def kernels(dtype: torch.dtype, device: torch.device, group: int, round: str, keep: bool) -> Kernels:  # noqa: A002
    """Return the kernels for one dtype and set of options. They allocate temporaries and never wait for the device."""
    along_elements = int8_torch.kernels(dtype, device, group, round, keep)

    def encode(numel: int, columns: int, src: torch.Tensor, out: torch.Tensor, key: int) -> None:
        codes, scales = _sections(out, numel, group, columns)
        out[numel : round_up(numel)].zero_()
        for start, count, first, last in _chunks(numel, group, columns):
            values = _tiled(storage_slice(src, start, count).to(torch.float32), group, columns)
            noise = None if round == "nearest" else _tiled(offsets(start, count, key, src.device), group, columns)
            found, scales_found = int8_torch.quantize(values, noise, keep, dim=1)
            scales[first:last] = scales_found.view(-1)
            codes[start : start + count] = found.view(-1)[:count]

    def decode(numel: int, columns: int, buf: torch.Tensor, out: torch.Tensor, key: int) -> None:
        codes, scales = _sections(buf, numel, group, columns)
        for start, count, first, last in _chunks(numel, group, columns):
            found = _tiled(codes[start : start + count], group, columns)
            noise = _tiled(offsets(start, count, key, out.device), group, columns) if round == "dither" else None
            values = int8_torch.dequantize(found, scales[first:last].view(-1, 1, columns), out.dtype, noise, keep)
            storage_slice(out, start, count).copy_(values.view(-1)[:count])

    return along_elements._replace(
        rows=lambda numel, columns: (partial(encode, numel, columns), partial(decode, numel, columns))
    )


def _sections(payload: torch.Tensor, numel: int, group: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    payload_pointer(payload)
    scales = payload[round_up(numel) :][: 2 * columns * -(-numel // (columns * group))].view(torch.bfloat16)
    return payload[:numel].view(torch.int8), scales


def _chunks(numel: int, group: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield chunks of whole groups of rows: first element, number of elements, first and last scale."""
    tile = group * columns
    step = max(1, CHUNK_NUMEL // tile) * tile
    for start in range(0, numel, step):
        count = min(step, numel - start)
        yield start, count, start // group, columns * -(-(start + count) // tile)


def _tiled(values: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    """Reshape a 1-d tensor to (groups of rows, group, columns), the last group filled with zeros."""
    return pad(values, (0, -len(values) % (group * columns))).view(-1, group, columns)
