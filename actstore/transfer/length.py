"""The lengths of payloads of variable size, which only the device knows."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

import torch

from actstore.devices import Device
from actstore.kernels.base import LENGTH_NBYTES

CELLS = 512


class Lengths:
    """Pinned cells that lengths are copied to. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = Lock()
        self._pages: list[torch.Tensor] = []
        self._cells: list[torch.Tensor] = []

    def expect(self, payload: torch.Tensor) -> Length:
        """The promise of the length at the beginning of `payload`, in the order of the current stream."""
        with self._lock:
            if not self._cells:
                self._cells = self._make()
            cell = self._cells.pop()
        return Length(self._device, payload, cell)

    def take(self, length: Length) -> int:
        """The length, once it is ready."""
        found = int(length.cell.view(torch.int64)[0])
        with self._lock:
            self._cells.append(length.cell)
        return found

    def close(self, awaited: Iterable[Length]) -> None:
        """Return the memory. The host waits until the device has written what is `awaited`."""
        for length in awaited:
            length.wait()
        pages, self._pages, self._cells = self._pages, [], []
        for page in pages:
            self._device.unpin(page)

    def _make(self) -> list[torch.Tensor]:
        nbytes = CELLS * LENGTH_NBYTES
        page = self._device.pinned(nbytes)
        if page is None:
            page = torch.empty(nbytes, dtype=torch.uint8)  # the copy then waits
        else:
            self._pages.append(page)
        return list(page.split(LENGTH_NBYTES))


class Length:
    """One of them.

    Attributes
    ----------
    stream : the stream on which the payload is made
    """

    def __init__(self, device: Device, payload: torch.Tensor, cell: torch.Tensor) -> None:
        self.stream = device.current()
        self.cell = cell
        self._copied = device.copy(cell, payload[:LENGTH_NBYTES], self.stream)

    def ready(self) -> bool:
        """Whether the length is known, without waiting."""
        return self._copied.ready()

    def wait(self) -> None:
        self._copied.result()
