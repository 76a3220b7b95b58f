"""The device tier: payloads wait in the memory of the compute device, where they were encoded."""

from __future__ import annotations

from typing import ClassVar

import torch

from actstore.ticket import DONE, Ticket
from actstore.tiers.base import Slot, Tier
from actstore.tiers.pool import BufferPool


class DeviceTier(Tier):
    """Memory of the compute device. On a CPU this is host memory, pooled; elsewhere torch's allocator pools."""

    name: ClassVar[str] = "device"
    on_device = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = BufferPool() if device.type == "cpu" else None

    def reserve(self, nbytes: int) -> Slot | None:
        if self._pool is not None:
            return Slot(nbytes, self._pool.take(nbytes))
        return Slot(nbytes, torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def write(self, slot: Slot, src: torch.Tensor) -> Ticket:
        slot.memory.copy_(src, non_blocking=True)
        return DONE

    def read(self, slot: Slot, dst: torch.Tensor) -> Ticket:
        dst.copy_(slot.memory, non_blocking=True)
        return DONE

    def free(self, slot: Slot) -> None:
        buffer, slot.buffer = slot.buffer, None
        if buffer is not None and self._pool is not None:
            self._pool.give(buffer)

    def trim(self) -> None:
        if self._pool is not None:
            self._pool.trim()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
