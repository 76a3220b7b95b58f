"""Groups of elements in storage order, as views of a tensor in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from actstore.base.layout import layout_of
from actstore.compiled.formats.sizes import hint
from actstore.kernels.rows import fit

MAX_IMAGE_LEAD = 3  # dimensions of an image in front of its groups: Inductor takes four for an image, and turns them
_CHANNELS_LAST = 0, 2, 3, 1


@dataclass(frozen=True)
class Grouping:
    """The way from a tensor to its groups of consecutive elements in storage order, and back.

    Attributes
    ----------
    dims : dimensions in storage order, the one with the largest stride first
    lead : number of dimensions before the tail; they stay as they are
    tail : sizes of the remaining dimensions, which are static, and cut into groups
    group : elements in a group
    image : height and width of an image whose channels are cut, joined to one dimension; empty for other tensors
    """

    dims: tuple[int, ...]
    lead: int
    tail: tuple[int, ...]
    group: int
    image: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements in the tail."""
        return prod(self.tail)

    @property
    def crosses_rows(self) -> bool:
        """True where groups start and end inside of rows."""
        return len(self.tail) > 1

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the elements in storage order, (lead ..., elements of the tail)."""
        ordered = tensor.permute(self.dims)
        if self.image:
            return ordered.flatten(1, 2)
        return ordered if len(self.tail) == 1 else ordered.flatten(self.lead)

    def split(self, rows: Tensor) -> list[Tensor]:
        """Return the groups of `group` elements, (lead ..., groups, group), then a shorter last one.

        A last group filled with zeros would be shorter code, but Inductor's loops then read wrong elements of it.
        """
        whole = self.numel - self.numel % self.group
        parts: list[Tensor] = []
        if whole:
            parts.append((rows[..., :whole] if whole < self.numel else rows).unflatten(-1, (-1, self.group)))
        if whole < self.numel:
            parts.append(rows[..., whole:].unsqueeze(-2))
        return parts

    def split_numbers(self, numbers: Tensor) -> list[Tensor]:
        """Return numbers of groups, (lead ..., groups), for each part of `split`, with a last dimension of one."""
        whole = self.numel // self.group
        parts = [numbers[..., :whole], numbers[..., whole:]] if whole and self.numel % self.group else [numbers]
        return [part.unsqueeze(-1) for part in parts]

    def join(self, groups: Sequence[Tensor]) -> Tensor:
        """Return the elements of groups in storage order: the inverse of `split`."""
        return joined([each.flatten(-2) for each in groups])

    def restore(self, rows: Tensor) -> Tensor:
        """Return the tensor from its elements in storage order: the inverse of `rows`."""
        if self.image:
            rows = rows.unflatten(1, self.image)
        elif len(self.tail) != 1:
            rows = rows.unflatten(-1, self.tail)
        return torch.permute(rows, [self.dims.index(dim) for dim in range(len(self.dims))])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return parts of each row side by side."""
    return torch.cat(list(parts), -1) if len(parts) > 1 else parts[0]


def storage_order(tensor: Tensor) -> tuple[tuple[int, ...] | None, str]:
    """Return the dimensions of a tensor of a graph in storage order, or None and the reason why they have none."""
    shape, stride = tuple(map(hint, tensor.shape)), tuple(map(hint, tensor.stride()))
    if 0 in shape:
        return None, "it has no elements"
    if layout_of(shape, stride).compact is None or any(st == 0 and n > 1 for n, st in zip(shape, stride, strict=True)):
        return None, "its elements overlap in memory"
    return tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))), ""


def group_tensor(tensor: Tensor, group: int, *, in_rows: bool = True) -> tuple[Grouping | None, str]:
    """Return the groups of a tensor of a graph, or None and the reason why it has none.

    With `in_rows` groups of at most `group` elements end with rows, else those of `group` elements follow each other.
    """
    if not tensor.shape:
        return None, "it has no dimension to cut into groups"
    dims, reason = storage_order(tensor)
    if dims is None:
        return None, reason
    width = 0
    if in_rows:
        group, width = fit(tuple(map(hint, tensor.shape)), tuple(map(hint, tensor.stride())), group)
    sizes = [tensor.shape[dim] for dim in dims]
    tail: list[int] = []
    for lead in range(len(dims) - 1, -1, -1):
        size: object = sizes[lead]
        if not isinstance(size, int):
            return None, "a size that changes from run to run stands inside of its groups"
        tail.insert(0, size)
        is_deep = dims == _CHANNELS_LAST and lead == MAX_IMAGE_LEAD
        if width == prod(tail) and is_deep and all(isinstance(each, int) for each in sizes[1:3]):
            return Grouping(dims, lead, tuple(tail), group, tuple(sizes[1:3])), ""
        if width == prod(tail) or (not width and prod(tail) % group == 0 and not is_deep):
            break
    return Grouping(dims, len(dims) - len(tail), tuple(tail), group), ""
