"""Indices of max pooling as places in their windows: two bits for a window of 2x2, four for a window of 3x3."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actstore.base.layout import layout_of
from actstore.recompute.operators import base_name

_BITS = {4: 2, 16: 4, 256: 8}  # bits of a code, by the largest number of places
_JOINED = {2: torch.int32, 4: torch.int16, 8: torch.uint8}  # by bits: the codes that one byte holds, each in a byte


class Windows(NamedTuple):
    """Places that the windows of one operator call read.

    Attributes
    ----------
    starts : first places of the windows in each dimension, in elements; negative in padding
    steps : distances from there to all places of a window, in each dimension
    sizes : sizes of the input, in each dimension
    """

    starts: tuple[Tensor, ...]
    steps: tuple[Tensor, ...]
    sizes: tuple[int, ...]

    @property
    def places(self) -> int:
        """Number of places in one window."""
        return prod(map(len, self.steps))

    def first(self) -> Tensor:
        """Return the index of each window's first place, in the shape of the windows."""
        return self._indices(self.starts)

    def beyond(self) -> Tensor:
        """Return the distance of each place of a window from its first, as a difference of indices."""
        return self._indices(self.steps).flatten()

    def _indices(self, places: tuple[Tensor, ...]) -> Tensor:
        result = places[0]
        for size, more in zip(self.sizes[1:], places[1:], strict=True):
            result = result.unsqueeze(-1) * size + more
        return result


class Places(NamedTuple):
    """Indices of the largest elements of windows, as numbers of places in them."""

    codes: Tensor
    bits: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    windows: Windows

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.codes.nbytes

    def read(self) -> Tensor:
        """Return the indices."""
        shifts = torch.arange(0, 8, self.bits)
        beyond = self.windows.beyond()
        known = torch.arange(256).unsqueeze(1) >> shifts & ((1 << self.bits) - 1)  # the places of each byte
        table = beyond[known.clamp_max_(len(beyond) - 1)].to(self.codes.device)
        found = table.index_select(0, self.codes.int()).flatten()
        return found.as_strided(self.shape, self.stride).add_(self.windows.first().to(found.device))


def places_of(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], indices: Tensor) -> Places | None:
    """Return indices of max pooling as places; None where the windows are unknown."""
    windows = None if kwargs or type(indices) is not Tensor else _windows_of(base_name(operator), args, indices)
    if windows is None or not layout_of(tuple(indices.shape), indices.stride()).dense:
        return None
    bits = next((bits for most, bits in _BITS.items() if windows.places <= most), None)
    if bits is None or not indices.numel():
        return None
    beyond = windows.beyond()
    codes = torch.zeros(int(beyond[-1]) + 1, dtype=torch.uint8)
    codes[beyond] = torch.arange(len(beyond), dtype=torch.uint8)
    found = torch.empty_strided(indices.shape, indices.stride(), dtype=torch.int64, device=indices.device)
    torch.sub(indices, windows.first().to(indices.device), out=found)
    flat = codes.to(indices.device).index_select(0, found.as_strided((found.numel(),), (1,)))
    several = torch.nn.functional.pad(flat, (0, -len(flat) % (8 // bits))).view(_JOINED[bits])
    packed = several.clone()
    for i in range(1, 8 // bits):  # the i-th byte's code goes beside the first one's
        packed |= several >> i * (8 - bits)
    packed = packed.to(torch.uint8)
    return Places(packed, bits, tuple(indices.shape), indices.stride(), windows)


def _windows_of(name: str, args: Sequence[Any], indices: Tensor) -> Windows | None:
    dims = 3 if "3d" in name else 2
    sizes, counts = tuple(args[0].shape[-dims:]), indices.shape[-dims:]
    starts, steps = [], []
    if name.startswith("adaptive"):
        for size, count in zip(sizes, counts, strict=True):
            begin = torch.arange(count) * size // count
            end = -(-(torch.arange(count) + 1) * size // count)
            starts.append(begin)
            steps.append(torch.arange(int((end - begin).max())))
    elif name.startswith("max_pool"):
        kernel, stride, padding, dilation = (
            _each(args[i] if len(args) > i else (), default, dims) for i, default in ((1, 1), (2, 0), (3, 0), (4, 1))
        )
        for k, s, p, d, count in zip(kernel, stride, padding, dilation, counts, strict=True):
            starts.append(torch.arange(count) * (s or k) - p)
            steps.append(torch.arange(k) * d)
    else:
        return None  # windows are random
    return Windows(tuple(starts), tuple(steps), sizes)


def _each(values: Sequence[int], default: int, dims: int) -> Sequence[int]:
    """Return one number for each dimension."""
    if not values:
        return (default,) * dims
    return tuple(values) * dims if len(values) == 1 else values
