"""Specs: the metadata with which a saved tensor must come back; and sites: the places that save tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch

from actstore.errors import SpecError


class Spec(NamedTuple):
    """The shape, stride, dtype and device that a tensor must have when it comes back."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Logical bytes: elements times element size, whatever the strides."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Allocate an uninitialized tensor of this spec."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def check(self, tensor: torch.Tensor) -> None:
        """Raise SpecError unless `tensor` has this spec: autograd itself takes anything."""
        found = Spec.of(tensor)
        if found != self:
            raise SpecError(f"a tensor came back as {found}, but {self} was saved.", found=found, expected=self)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {'x'.join(map(str, self.shape)) or 'scalar'} stride {self.stride} on {self.device}"


def describe(tensor: torch.Tensor) -> str:
    """Describe a tensor for messages, also a nested one, which has more than one shape."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return f"nested {str(tensor.dtype).removeprefix('torch.')} of {tensor.size(0)} tensors on {tensor.device}"
    return str(Spec.of(tensor))


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the model that saves a tensor: module name, index within its call, optional tag.

    Index -1 stands for all tensors of the module that are kept because they are small. A policy is also told the
    `operator` that made the tensor, such as ``aten.gelu``; empty where that is unknown. Sites are equal without it.
    """

    name: str
    index: int
    tag: str = ""
    operator: str = field(default="", compare=False)

    def __str__(self) -> str:
        tag = f"/{self.tag}" if self.tag else ""
        return f"{self.name or '(top)'}{tag}{f'[{self.index}]' if self.index >= 0 else ''}"
