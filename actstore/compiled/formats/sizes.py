"""Sizes of tensors in a graph, which may be symbols."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def hint(size: Any) -> int:
    """Return a size as a number: that of the run that was traced, where the graph serves several.

    Raises
    ------
    ValueError : only the run itself knows the size
    """
    if isinstance(size, int):
        return size
    found = size.node.hint
    if found is None:
        raise ValueError(f"size={size}: known in the run alone.")
    return int(found)


def is_fixed(tensor: Tensor) -> bool:
    """Return whether all sizes and strides are numbers, the same in each run."""
    return all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride()))


def hinted_nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, by the hints of its sizes."""
    return hint(tensor.numel()) * tensor.dtype.itemsize
