"""Comparison of two pieces of memory, byte by byte."""

from __future__ import annotations

from ctypes import CDLL, c_int, c_size_t, c_void_p

import torch
from torch import Tensor

CHUNK_WORDS = 2**23  # compared at a time on a device, so that the comparison needs little memory
_compare = CDLL(None).memcmp
_compare.argtypes, _compare.restype = [c_void_p, c_void_p, c_size_t], c_int


def same_on_host(a: int, b: int, nbytes: int) -> bool:
    """Return whether `nbytes` at two addresses of host memory are equal."""
    return not _compare(a, b, nbytes)


def difference_on_device(a: Tensor, b: Tensor) -> Tensor:
    """Compare two tensors, 1-d uint8 of one size, without a wait. Return a 0-d bool tensor on their device."""
    found = torch.zeros((), dtype=torch.bool, device=a.device)
    whole = a.numel() & -8
    if whole and a.data_ptr() % 8 == b.data_ptr() % 8 == 0:
        words = a[:whole].view(torch.int64), b[:whole].view(torch.int64)
        for x, y in zip(words[0].split(CHUNK_WORDS), words[1].split(CHUNK_WORDS), strict=True):
            found = found | (x != y).any()
        a, b = a[whole:], b[whole:]
    return found | (a != b).any()
