"""A checksum that runs where the bytes are."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

CHUNK_WORDS = 2**20  # summed at a time, so that the sum needs little memory
MULTIPLIER = 6364136223846793005  # of Knuth's MMIX generator: odd, and so no information is lost


def checksum(memory: torch.Tensor) -> torch.Tensor:
    """Compute 64 bits that change when a byte changes or when two words swap, as a 0-d int64 tensor on the same device.

    Parameters
    ----------
    memory : Tensor, 1-d uint8, contiguous, 8-byte aligned

    Notes
    -----
    Stream: current. Host sync: none. Equal on every device: integer sums do not depend on their order.
    """
    nbytes = memory.numel()
    whole = nbytes // 8
    total = torch.full((), nbytes, dtype=torch.int64, device=memory.device)
    words = memory[: 8 * whole].view(torch.int64)
    for start in range(0, whole, CHUNK_WORDS):
        part = words[start : start + CHUNK_WORDS]
        if memory.device.type == "cpu":  # torch.dot takes integers here, and is many times as fast
            weighted = torch.dot(part, torch.from_numpy(_places()[: part.numel()]))
        else:
            places = torch.arange(part.numel(), dtype=torch.int64, device=memory.device) * 2 + 1
            weighted = (part * places).sum()
        total = total * MULTIPLIER + weighted
    for byte in memory[8 * whole :].to(torch.int64):
        total = total * MULTIPLIER + byte
    return total


@lru_cache(maxsize=1)
def _places() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the weights of a chunk's words: a NumPy array, which no active torch mode can change."""
    return np.arange(CHUNK_WORDS, dtype=np.int64) * 2 + 1
