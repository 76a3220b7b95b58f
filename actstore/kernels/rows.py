"""Groups that end with the rows of a tensor: which rows they are, and the bytes of payloads. See csrc/rows.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from actstore.base.layout import layout_of
from actstore.kernels.base import Kernels, payload_pointer, round_up, storage_slice

LEAST_ROW = 16  # elements: scales of shorter ones would take more than an eighth of their codes of 8 bits
LEAST_GROUP = 32  # elements of a group of the kernels, which may be filled


@lru_cache(maxsize=4096)
def row_numel(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the elements in a row of a tensor; 0 where it is one row."""
    sizes = (layout_of(shape, stride).compact or ((),))[0]
    width = 1
    for place in range(len(sizes) - 1, 0, -1):
        width *= sizes[place]
        if width >= LEAST_ROW:
            return width
    return 0


def fit(shape: tuple[int, ...], stride: tuple[int, ...], most: int) -> tuple[int, int]:
    """Fit the length of groups, at most `most`, to the rows of a tensor.

    Returns
    -------
    group : the length of groups
    width : the length of the rows at whose ends groups end; 0 where consecutive groups of that length do so anyway
    """
    width = row_numel(shape, stride)
    if not width:
        return most, 0
    divisor = width & -width
    if divisor >= LEAST_GROUP:
        return min(divisor, most), 0
    return min(most, max(LEAST_GROUP, 1 << (width - 1).bit_length())), width


class Format(NamedTuple):
    """A payload of groups: sections of codes, then sections of numbers of groups.

    Attributes
    ----------
    planes : bits of an element in each section of codes
    numbers : bytes of a group in each section of numbers
    """

    planes: tuple[int, ...]
    numbers: tuple[int, ...]

    def lengths(self, rows: int, width: int, group: int) -> list[int]:
        """Return the bytes of each section without padding. Each row of codes begins with a byte."""
        groups = rows * -(-width // group)
        return [*(rows * -(-width * bits // 8) for bits in self.planes), *(groups * size for size in self.numbers)]

    def nbytes(self, rows: int, width: int, group: int) -> int:
        """Return the bytes of a payload. Each section but the last is filled up to a multiple of 16."""
        *first, last = self.lengths(rows, width, group)
        return sum(map(round_up, first)) + last


def in_rows(kernels: Kernels, form: Format, group: int) -> Kernels:
    """Return the same kernels, which also encode and decode tensors whose groups end with rows.

    They fill rows with their last element up to whole groups, and leave out the codes of these.
    """

    def sections(payload: torch.Tensor, rows: int, width: int) -> list[torch.Tensor]:
        found, start = [], 0
        for length in form.lengths(rows, width, group):
            found.append(payload[start : start + length])
            start += round_up(length)
        return found

    def encode(numel: int, width: int, src: torch.Tensor, out: torch.Tensor, key: int) -> None:
        payload_pointer(out)
        rows, whole = numel // width, -(-width // group) * group
        elements = storage_slice(src, 0, numel).view(rows, width)
        filled = torch.cat([elements, elements[:, -1:].expand(rows, whole - width)], 1)
        payload = torch.empty(form.nbytes(rows, whole, group), dtype=torch.uint8, device=src.device)
        kernels.encode(filled, payload, filled.numel(), key)
        pairs = zip(sections(payload, rows, whole), sections(out, rows, width), strict=True)
        for number, (source, target) in enumerate(pairs):
            if number < len(form.planes):
                codes = target.view(rows, -1)
                codes.copy_(source.view(rows, -1)[:, : codes.shape[1]])
                if rest := width * form.planes[number] % 8:
                    codes[:, -1] &= (1 << rest) - 1
            else:
                target.copy_(source)
        end = 0
        for length in form.lengths(rows, width, group)[:-1]:
            end += length
            out[end : round_up(end)].zero_()
            end = round_up(end)

    def decode(numel: int, width: int, buf: torch.Tensor, out: torch.Tensor, key: int) -> None:
        payload_pointer(buf)
        rows, whole = numel // width, -(-width // group) * group
        payload = torch.empty(form.nbytes(rows, whole, group), dtype=torch.uint8, device=out.device)
        pairs = zip(sections(buf, rows, width), sections(payload, rows, whole), strict=True)
        for number, (source, target) in enumerate(pairs):
            if number < len(form.planes):
                codes = source.view(rows, -1)
                target.view(rows, -1)[:, : codes.shape[1]] = codes
            else:
                target.copy_(source)
        filled = torch.empty(rows, whole, dtype=out.dtype, device=out.device)
        kernels.decode(payload, filled, filled.numel(), key)
        storage_slice(out, 0, numel).view(rows, width).copy_(filled[:, :width])

    def rows(numel: int, width: int) -> tuple[Callable[..., None], Callable[..., None]]:
        return partial(encode, numel, width), partial(decode, numel, width)

    return kernels._replace(rows=rows)
