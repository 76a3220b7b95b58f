"""Groups of elements in storage order, as views of a tensor in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from actstore.base.layout import layout_of
from actstore.compiled.formats.sizes import hint

MAX_IMAGE_LEAD = 3  # dimensions of an image in front of its groups: Inductor takes four for an image, and turns them
_CHANNELS_LAST = 0, 2, 3, 1


@dataclass(frozen=True)
class Grouping:
    """The way from a tensor to its groups of consecutive elements in storage order, and back.

    Attributes
    ----------
    dims : dimensions in storage order, the one with the largest stride first
    lead : so many of them stay as they are; the remaining ones have static sizes, and are cut into groups
    tail : these sizes
    group : elements in a group
    """

    dims: tuple[int, ...]
    lead: int
    tail: tuple[int, ...]
    group: int

    @property
    def numel(self) -> int:
        """Number of elements in the tail."""
        return prod(self.tail)

    @property
    def crosses_rows(self) -> bool:
        """True where groups begin and end inside of rows."""
        return len(self.tail) > 1

    @property
    def fill(self) -> int:
        """Number of elements that the last group lacks."""
        return -self.numel % self.group

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the elements in storage order, (lead ..., elements of the tail)."""
        ordered = tensor.permute(self.dims)
        return ordered if len(self.tail) == 1 else ordered.flatten(self.lead)

    def split(self, rows: Tensor) -> Tensor:
        """Return (lead ..., groups, group), the last group filled with zeros."""
        if self.fill:
            rows = torch.nn.functional.pad(rows, (0, self.fill))
        groups: Tensor = rows.unflatten(-1, (-1, self.group))
        return groups

    def join(self, groups: Tensor) -> Tensor:
        """Return the elements of groups in storage order, without the fill: the inverse of `split`."""
        rows = groups.flatten(-2)
        return rows[..., : -self.fill] if self.fill else rows

    def restore(self, rows: Tensor) -> Tensor:
        """Return the tensor from its elements in storage order: the inverse of `rows`."""
        if len(self.tail) != 1:
            rows = rows.unflatten(-1, self.tail)
        return torch.permute(rows, [self.dims.index(dim) for dim in range(len(self.dims))])


def storage_order(tensor: Tensor) -> tuple[tuple[int, ...] | None, str]:
    """Return the dimensions of a tensor of a graph in storage order, or None and the reason why they have none."""
    shape, stride = tuple(map(hint, tensor.shape)), tuple(map(hint, tensor.stride()))
    if 0 in shape:
        return None, "it has no elements"
    if layout_of(shape, stride).compact is None or any(st == 0 and n > 1 for n, st in zip(shape, stride, strict=True)):
        return None, "its elements overlap in memory"
    return tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))), ""


def group_tensor(tensor: Tensor, group: int) -> tuple[Grouping | None, str]:
    """Return the groups of a tensor of a graph, or None and the reason why it has none."""
    if not tensor.shape:
        return None, "it has no dimension to cut into groups"
    dims, reason = storage_order(tensor)
    if dims is None:
        return None, reason
    sizes = [tensor.shape[dim] for dim in dims]
    tail: list[int] = []
    for lead in range(len(dims) - 1, -1, -1):
        size: object = sizes[lead]
        if not isinstance(size, int):
            return None, "a size that changes from run to run stands inside of its groups"
        tail.insert(0, size)
        if prod(tail) % group == 0 and (dims != _CHANNELS_LAST or lead < MAX_IMAGE_LEAD):
            break
    return Grouping(dims, len(dims) - len(tail), tuple(tail), group), ""
