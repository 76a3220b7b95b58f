"""Tiers around tiers that are slow or fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from actstore.base.ticket import JobTicket, Span, Ticket
from actstore.errors import StateError, TransferError
from actstore.tiers import Slot, Tier


class Wrapper(Tier):
    """Another tier, as it is."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name = tier.name
        self.on_device = tier.on_device

    def room(self, nbytes: int) -> int:
        return self.tier.room(nbytes)

    def reserve(self, nbytes: int) -> Slot | None:
        return self.tier.reserve(nbytes)

    def write(self, slot: Slot, src: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        return self.tier.write(slot, src, after)

    def read(self, slot: Slot, dst: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        return self.tier.read(slot, dst, after)

    def free(self, slot: Slot) -> None:
        self.tier.free(slot)

    def trim(self) -> None:
        self.tier.trim()

    def close(self) -> None:
        self.tier.close()


class Slow(Wrapper):
    """Each write and read starts only after a while, on a thread of its own; what is dropped by then is not done.

    Attributes
    ----------
    writes, reads : how many were done
    """

    def __init__(self, tier: Tier, seconds: float = 0.005) -> None:
        super().__init__(tier)
        self.seconds = seconds
        self.writes = self.reads = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="actstore-slow")
        self._jobs: dict[int, list[Future[Span]]] = {}  # of the slots that are not freed

    def write(self, slot: Slot, src: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        def work() -> None:
            self.tier.write(slot, src, tuple(after)).result()
            self.writes += 1

        slot.written = self._submit(slot, work)
        return slot.written

    def read(self, slot: Slot, dst: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        written = slot.written

        def work() -> None:
            written.result()
            self.tier.read(slot, dst, tuple(after)).result()
            self.reads += 1

        try:
            return self._submit(slot, work)
        except StateError:
            return self.tier.read(slot, dst)

    def free(self, slot: Slot) -> None:
        jobs = self._jobs.pop(id(slot), None)
        if jobs is None:
            self.tier.free(slot)
        else:  # in the order of their submission: with the last one, all are done
            jobs[-1].add_done_callback(lambda _: self.tier.free(slot))

    def close(self) -> None:
        self._worker.shutdown()
        super().close()

    def _submit(self, slot: Slot, work: Callable[[], None]) -> Ticket:
        def job() -> Span:
            begin = time.perf_counter_ns()
            time.sleep(self.seconds)
            if id(slot) in self._jobs:
                work()
            return begin, time.perf_counter_ns()

        try:
            jobs = self._jobs.setdefault(id(slot), [])
            jobs.append(self._worker.submit(job))
        except RuntimeError as error:
            raise StateError(f"the {self.name} tier is closed") from error
        return JobTicket(jobs[-1:])


class Faulty(Wrapper):
    """The operations named in `faults` fail: "reserve", "write", "read" at the call, "late ..." in the ticket."""

    def __init__(self, tier: Tier, *faults: str) -> None:
        super().__init__(tier)
        self.faults = set(faults)
        self._lost: list[Ticket] = []  # writes that failed late

    def reserve(self, nbytes: int) -> Slot | None:
        self._fail("reserve")
        return super().reserve(nbytes)

    def write(self, slot: Slot, src: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        self._fail("write")
        if "late write" in self.faults:
            slot.written = self._fail_late("late write")
            self._lost.append(slot.written)
            return slot.written
        return super().write(slot, src, after)

    def read(self, slot: Slot, dst: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        self._fail("read")
        if slot.written in self._lost:
            return slot.written
        return self._fail_late("late read") if "late read" in self.faults else super().read(slot, dst, after)

    def _fail(self, what: str) -> None:
        if what in self.faults:
            raise TransferError(f"a planted fault of {what}", what=what)

    def _fail_late(self, what: str) -> Ticket:
        job: Future[Span] = Future()
        job.set_exception(TransferError(f"a planted fault of {what}", what=what))
        return JobTicket([job])
