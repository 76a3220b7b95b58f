"""shelf: payloads wait in plain host memory, as they might in an object store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor

from actstore.errors import StateError
from actstore.tiers import DONE, Device, Slot, Ticket, Tier, too_late


class Shelf(Tier):
    """Each payload is a CPU tensor. Writes and reads wait for the device: simple, right, and slow."""

    name: ClassVar[str] = "shelf"

    def __init__(self, device: Device) -> None:
        self._device = device
        self._closed = False

    def reserve(self, nbytes: int) -> Slot | None:
        self._require_open()
        return Slot(nbytes)

    def write(self, slot: Slot, src: Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        self._require_open()
        for ticket in after:
            ticket.result()
        slot.place = src.to("cpu", copy=True)
        return DONE

    def read(self, slot: Slot, dst: Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        if self._closed:
            return too_late(self.name)
        for ticket in after:
            ticket.result()
        dst.copy_(slot.place[: dst.numel()])
        return self._device.record(self._device.current())

    def free(self, slot: Slot) -> None:
        slot.place = None

    def close(self) -> None:
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise StateError(f"the {self.name} tier is closed. Make a new ActivationStore")
