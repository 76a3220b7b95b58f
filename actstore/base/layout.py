"""The layout of a tensor's elements in its storage."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """The elements of a storage that a shape with strides addresses.

    Attributes
    ----------
    span : elements from the first to the last one addressed, gaps included
    dense : each element of the span is addressed exactly once
    compact : a view of unique elements (expanded dimensions cut to one), as (shape, stride) in storage order; None
        where elements overlap in another way
    """

    span: int
    dense: bool
    compact: tuple[tuple[int, ...], tuple[int, ...]] | None


@lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> Layout:
    """Analyze a shape with its strides, in elements. Cached: a model repeats a few of them."""
    if 0 in shape:
        return Layout(0, True, (shape, stride))
    dims = sorted(((st, n) for n, st in zip(shape, stride, strict=True) if n > 1 and st != 0), reverse=True)
    span = 1 + sum((n - 1) * st for st, n in dims)
    inner, disjoint = 1, True  # elements addressed by the dimensions seen so far, smallest stride first
    reach = 1  # one past the last element that they address
    for st, n in reversed(dims):
        disjoint &= st >= reach
        reach = (n - 1) * st + reach
        inner *= n
    expanded = any(n > 1 and st == 0 for n, st in zip(shape, stride, strict=True))
    compact = (tuple(n for _, n in dims), tuple(st for st, _ in dims)) if disjoint else None
    return Layout(span, disjoint and not expanded and inner == span, compact)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; of a sparse COO tensor's values and indices; 0 for other layouts."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    return 0


def storage_view(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return `count` consecutive elements of the storage under `tensor`, from element `start`, as a 1-d tensor."""
    return tensor.detach().as_strided((count,), (1,), start)
