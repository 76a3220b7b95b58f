"""Tiers around tiers that are slow or fail."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from actstore.errors import TransferError
from actstore.ticket import FutureTicket, Ticket
from actstore.tiers import Slot, Tier


class Wrapper(Tier):
    """Another tier, as it is."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name = tier.name
        self.on_device = tier.on_device

    def reserve(self, nbytes: int) -> Slot | None:
        return self.tier.reserve(nbytes)

    def write(self, slot: Slot, src: torch.Tensor) -> Ticket:
        return self.tier.write(slot, src)

    def read(self, slot: Slot, dst: torch.Tensor) -> Ticket:
        return self.tier.read(slot, dst)

    def free(self, slot: Slot) -> None:
        self.tier.free(slot)

    def trim(self) -> None:
        self.tier.trim()

    def close(self) -> None:
        self.tier.close()


class Slow(Wrapper):
    """Each write starts only after a while, on a thread of its own; what is dropped in the meantime is not written."""

    def __init__(self, tier: Tier, seconds: float = 0.005) -> None:
        super().__init__(tier)
        self.seconds = seconds
        self.writes = 0
        self._worker = ThreadPoolExecutor(1)
        self._pending: dict[int, Future[None]] = {}

    def write(self, slot: Slot, src: torch.Tensor) -> Ticket:
        future = self._pending[id(slot)] = self._worker.submit(self._write, slot, src)
        slot.written = FutureTicket(future)
        return slot.written

    def read(self, slot: Slot, dst: torch.Tensor) -> Ticket:
        self._pending[id(slot)].result()
        return super().read(slot, dst)

    def free(self, slot: Slot) -> None:
        pending = self._pending.pop(id(slot), None)
        if pending is None:
            super().free(slot)
        else:
            pending.add_done_callback(lambda _: self.tier.free(slot))

    def close(self) -> None:
        self._worker.shutdown()
        super().close()

    def _write(self, slot: Slot, src: torch.Tensor) -> None:
        time.sleep(self.seconds)
        ticket = self.tier.write(slot, src)
        ticket.result()
        self.writes += 1


class Faulty(Wrapper):
    """The operations named in `faults` raise."""

    def __init__(self, tier: Tier, *faults: str) -> None:
        super().__init__(tier)
        self.faults = set(faults)

    def reserve(self, nbytes: int) -> Slot | None:
        self._fail("reserve")
        return super().reserve(nbytes)

    def write(self, slot: Slot, src: torch.Tensor) -> Ticket:
        self._fail("write")
        return super().write(slot, src)

    def read(self, slot: Slot, dst: torch.Tensor) -> Ticket:
        self._fail("read")
        return super().read(slot, dst)

    def _fail(self, what: str) -> None:
        if what in self.faults:
            raise TransferError(f"a planted fault of {what}", what=what)
