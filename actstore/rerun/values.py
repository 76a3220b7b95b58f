"""Tensors recorded to be restored; their bits: checksums, copies, and the distance of two tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from actstore.base.checksum import checksum

CHUNK_NUMEL = 2**22  # bounds the temporaries in double precision


@dataclass(frozen=True)
class Error:
    """Distance of two tensors.

    norm : norm of the finite expected values
    off : norm of the difference; infinite where only one of two elements is finite
    max_abs : the largest difference of two elements
    """

    equal: bool  # bit for bit
    norm: float
    off: float = 0.0
    max_abs: float = 0.0

    @property
    def relative(self) -> float:
        return relative(self.off, self.norm)


def relative(off: float, norm: float) -> float:
    """Return `off` divided by `norm`: 0 for `off` 0, otherwise infinite for `norm` 0."""
    if not off:
        return 0.0
    return off / norm if norm else math.inf


def parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that hold the bytes of `tensor`; empty where the bytes cannot be read.

    Notes
    -----
    A strided tensor is its own part: a write to the part writes to the tensor. A sparse tensor gives a dense copy.
    """
    tensor = tensor.detach()
    if tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return []
    inner: Any = tensor
    if is_traceable_wrapper_subclass(inner):
        return [part for name in inner.__tensor_flatten__()[0] for part in parts(getattr(inner, name))]
    if tensor.is_nested:
        return [part for inner in tensor.unbind() for part in parts(inner)]
    if tensor.layout is not torch.strided:
        return [tensor.to_dense()]
    return [tensor]


def components(tensor: Tensor) -> list[Tensor]:
    """Return the indices and values of a sparse tensor, not copied; empty for another layout."""
    tensor = tensor.detach()
    match tensor.layout:
        case torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a strided tensor in element order: 1-d uint8, 8-byte aligned. May share its memory."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.data_ptr() % 8 or flat.stride(0) != 1:
        flat = torch.empty(flat.numel(), dtype=flat.dtype, device=flat.device).copy_(flat)
    return flat.view(torch.uint8)


def digest(tensor: Tensor) -> list[Tensor]:
    """Return the checksums of the parts of `tensor`, on its device. The host does not wait."""
    with torch.no_grad():
        return [checksum(bytes_of(part)) for part in parts(tensor)]


def copies(tensor: Tensor) -> list[Tensor]:
    """Copy the parts of `tensor` to host memory. The host waits."""
    with torch.no_grad():
        return [part.to("cpu", copy=True) for part in parts(tensor)]


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit: NaN and the sign of zero count, strides do not."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.equal(bytes_of(found), bytes_of(expected.to(found.device)))


def compare(found: list[Tensor], expected: list[Tensor]) -> Error:
    """Return the distance of the parts of one tensor from those of another."""
    if [(t.shape, t.dtype) for t in found] != [(t.shape, t.dtype) for t in expected]:
        return Error(False, _norm(expected), math.inf, math.inf)
    if all(same_bits(a, b) for a, b in zip(found, expected, strict=True)):
        return Error(True, _norm(expected))
    off = largest = 0.0
    for a, b in zip(found, expected, strict=True):
        wide = torch.complex128 if a.is_complex() else torch.float64
        pairs = zip(a.reshape(-1).split(CHUNK_NUMEL), b.reshape(-1).split(CHUNK_NUMEL), strict=True)
        for x, y in ((x.to(wide), y.to(wide)) for x, y in pairs):
            away = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
            if away.numel():
                away = away.nan_to_num(math.inf, math.inf)
                off += float(away.square().sum())
                largest = max(largest, float(away.max()))
    return Error(False, _norm(expected), math.sqrt(off), largest)


def _norm(tensors: list[Tensor]) -> float:
    chunks = (chunk for tensor in tensors for chunk in tensor.reshape(-1).split(CHUNK_NUMEL))
    wide = (x.to(torch.complex128 if x.is_complex() else torch.float64).abs() for x in chunks)
    return math.sqrt(sum(float(x.nan_to_num(0.0, 0.0).square().sum()) for x in wide))


class Value:
    """A tensor, a copy of its values in host memory, and its version; None for one that keeps no versions."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version
        self._sparse = tensor.detach() if components(tensor) else None  # keeps the indices and values alive
        self._copies = [copy for part in self._parts() for copy in copies(part)]

    def restore(self) -> None:
        if self._sparse is not None:
            self.tensor.data = self._sparse.detach()
        for part, copy in zip(self._parts(), self._copies, strict=True):
            if not same_bits(part, copy):
                part.data.copy_(copy)

    def _parts(self) -> list[Tensor]:
        return parts(self.tensor) if self._sparse is None else components(self._sparse)


class Gradient:
    """A leaf, its `requires_grad` flag, and its gradient."""

    def __init__(self, leaf: Tensor) -> None:
        self.leaf, self._requires_grad, self.grad = leaf, leaf.requires_grad, leaf.grad

    def restore(self, *, fresh: bool) -> None:
        """Put the gradient back, as a copy (`fresh`) or as the object that it was."""
        leaf, grad = self.leaf, self.grad
        if leaf.requires_grad != self._requires_grad:
            leaf.requires_grad_(self._requires_grad)
        leaf.grad = grad.detach().clone() if fresh and grad is not None else grad
