"""Memory of a simulated device and of its host: reused at once, and full of 0xFF where nobody has written."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import torch

from tests.simulation.agents import Stream

POISON = 0xFF
ALIGN = 512
REGION_NBYTES = 1 << 20
SMALL_NBYTES = 1 << 18  # poisoned as a whole

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_regions: list[
    Bytes
] = []  # device memory of one simulation after another: never unmapped, so that no late copy crashes
_idle: dict[int, list[Bytes]] = {}  # pinned memory that no simulation uses, poisoned, by size


def _map(nbytes: int) -> Bytes:
    pages = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    pages.fill(POISON)
    return pages


class Block:
    """An allocation; `lo` to `hi` is what may have been written."""

    __slots__ = ("base", "bytes", "gone", "hi", "lo", "nbytes", "pinned", "stream", "view")

    def __init__(self, memory: Bytes, base: int, nbytes: int, stream: Stream | None) -> None:
        self.bytes = memory
        self.base = base
        self.nbytes = nbytes
        self.stream = stream  # whose allocator it came from; None for pinned memory
        self.pinned = stream is None
        self.gone = False
        self.lo, self.hi = base + nbytes, base
        self.view: object = None

    def poison(self) -> None:
        """Forget what was written; in large memory what nobody told of stays."""
        if self.nbytes <= SMALL_NBYTES:
            self.bytes.fill(POISON)
        elif self.lo < self.hi:
            self.bytes[self.lo - self.base : self.hi - self.base] = POISON
        self.lo, self.hi = self.base + self.nbytes, self.base


class Heap:
    """Gives out device memory, for the work of one stream, and pinned memory.

    Like torch's allocator it gives what was freed last to the next request of that size on the same stream.

    Parameters
    ----------
    died : called with a block of device memory when its last reference is gone, by whoever drops that; returns nothing
    """

    def __init__(self, died: Callable[[Block], None]) -> None:
        self.blocks: dict[int, Block] = {}
        self.pinned_nbytes = 0
        self.device_nbytes = 0
        self._died = died
        self._idle: dict[tuple[int, int], list[Block]] = {}  # by stream and size
        self._region = 0
        self._used = 0  # of that region

    def device(self, nbytes: int, stream: Stream) -> torch.Tensor:
        size = -(-nbytes // ALIGN) * ALIGN
        idle = self._idle.get((stream.id, size))
        block = idle.pop() if idle else self._carve(size, stream)
        block.gone = False
        self.device_nbytes += size
        memory = block.bytes[:nbytes]  # a new object, alive as long as a tensor on it
        block.view = ref(memory, lambda _: self._died(block))
        return torch.from_numpy(memory)

    def release(self, block: Block) -> None:
        """Give device memory to the next request of its stream."""
        assert block.stream is not None
        block.gone, block.view = True, None
        block.poison()
        self.device_nbytes -= block.nbytes
        self._idle.setdefault((block.stream.id, block.nbytes), []).append(block)

    def pinned(self, nbytes: int) -> torch.Tensor:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        idle = _idle.get(size)
        pages = idle.pop() if idle else _map(size)
        base = pages.ctypes.data
        self.blocks[base] = Block(pages, base, size, None)
        self.pinned_nbytes += size
        return torch.from_numpy(pages)[:nbytes]

    def unpin(self, block: Block) -> None:
        block.gone = True
        block.poison()
        self.pinned_nbytes -= block.nbytes

    def close(self) -> None:
        """Let the next simulation have device memory, and pinned memory that was returned."""
        for block in self.blocks.values():
            if not block.pinned:
                block.poison()
            elif block.gone:
                _idle.setdefault(block.nbytes, []).append(block.bytes)

    def find(self, address: int) -> Block | None:
        """The allocation that an address lies in; None for memory that is not of this heap."""
        for block in self.blocks.values():
            if block.base <= address < block.base + block.nbytes:
                return block
        return None

    def _carve(self, size: int, stream: Stream) -> Block:
        while True:
            if self._region == len(_regions):
                _regions.append(_map(max(REGION_NBYTES, size)))
            region = _regions[self._region]
            if self._used + size <= region.nbytes:
                break
            self._region, self._used = self._region + 1, 0
        memory = region[self._used : self._used + size]
        self._used += size
        base = memory.ctypes.data
        block = self.blocks[base] = Block(memory, base, size, stream)
        return block
