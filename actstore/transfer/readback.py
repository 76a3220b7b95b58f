"""Small results that the device computes, on their way to the host, which does not block for them."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any

import torch

from actstore.devices import Device

RESULTS_PER_PAGE = 512


class Readbacks:
    """Pinned memory for results of `nbytes` bytes each. Thread-safe."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._lock = Lock()
        self._pages: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []

    def expect(self, memory: torch.Tensor) -> Readback:
        """Queue a copy of the first bytes of `memory` (1-d uint8) on the current stream, and return the copy."""
        with self._lock:
            if not self._free:
                self._free = self._make()
            target = self._free.pop()
        return Readback(self._device, memory[: self._nbytes], target)

    def take(self, readback: Readback, dtype: torch.dtype) -> list[Any]:
        """Return the bytes as numbers of `dtype` and free their memory. The copy must be ready."""
        found = [number.item() for number in readback.memory.view(dtype)]
        with self._lock:
            self._free.append(readback.memory)
        return found

    def close(self, awaited: Iterable[Readback]) -> None:
        """Return the memory, after the host has waited for the copies in `awaited`."""
        for readback in awaited:
            readback.wait()
        pages, self._pages, self._free = self._pages, [], []
        for page in pages:
            self._device.unpin(page)

    def _make(self) -> list[torch.Tensor]:
        nbytes = RESULTS_PER_PAGE * self._nbytes
        page = self._device.pinned(nbytes)
        if page is None:
            page = torch.empty(nbytes, dtype=torch.uint8)  # not pinned: the copy blocks
        else:
            self._pages.append(page)
        return list(page[:nbytes].split(self._nbytes))


class Readback:
    """One result, and its copy to the host.

    Attributes
    ----------
    stream : the stream of the copy
    memory : the destination, uint8
    """

    def __init__(self, device: Device, source: torch.Tensor, memory: torch.Tensor) -> None:
        self.stream = device.current()
        self.memory = memory
        self._copied = device.copy(memory, source, self.stream)

    def ready(self) -> bool:
        """Return whether the bytes are on the host, without waiting."""
        return self._copied.ready()

    def wait(self) -> None:
        """Wait on the host until they are."""
        self._copied.result()
