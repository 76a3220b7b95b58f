"""Comparison of two pieces of memory, byte by byte or by fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from ctypes import CDLL, c_int, c_size_t, c_void_p

import torch
from torch import Tensor

digest: Callable[[memoryview], bytes]
try:
    import xxhash

    digest = xxhash.xxh3_128_digest
except ImportError:  # the extra `disk` is not installed

    def digest(memory: memoryview) -> bytes:
        return hashlib.blake2b(memory, digest_size=16).digest()


WORDS = 2**23  # compared at a time on a device, so that it needs little memory
_FACTORS = 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85  # odd, of L'Ecuyer's tables: a product with one loses nothing
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
        for x, y in zip(words[0].split(WORDS), words[1].split(WORDS), strict=True):
            found = found | (x != y).any()
        a, b = a[whole:], b[whole:]
    return found | (a != b).any()


def fingerprint(memory: Tensor) -> bytes | Tensor:
    """Compute a value that differs for other bytes, but for a chance of 2**-64 at most.

    Parameters
    ----------
    memory : Tensor, 1-d uint8, contiguous

    Returns
    -------
    bytes of host memory; elsewhere a 0-d int64 tensor on the device, without a wait
    """
    return digest(memory.numpy().data) if memory.is_cpu else mixed(memory)


def mixed(memory: Tensor) -> Tensor:
    """Compute a fingerprint by operations of any device: each word is mixed with its place, and the words are added.

    A plain weighted sum would not do: it misses a change of all signs.
    """
    whole = memory.numel() & -8
    total = torch.full((), memory.numel(), dtype=torch.int64, device=memory.device)
    tail = torch.zeros(8, dtype=torch.uint8, device=memory.device)
    tail[: memory.numel() - whole] = memory[whole:]
    body = memory[:whole]
    if body.data_ptr() % 8:
        body = body.clone()
    for words in (*body.view(torch.int64).split(WORDS), tail.view(torch.int64)):
        places = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=memory.device)
        mix = (words ^ (places * _FACTORS[1])) * _FACTORS[0]
        mix = (mix ^ (mix >> 29)) * _FACTORS[1]
        total = (total ^ (total >> 31)) * _FACTORS[0] + (mix ^ (mix >> 32)).sum()
    return total
