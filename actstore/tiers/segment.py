"""A segment: one piece of memory, with ranges that owners take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actstore.base.ticket import Ticket
from actstore.tiers.extents import Extents

ALIGN_NBYTES = 64  # a cache line, which no two ranges share


class Segment:
    """Memory and its free ranges, the lowest address first. Not thread-safe.

    Attributes
    ----------
    unused_steps : steps that have begun since a range was last taken
    """

    def __init__(self, memory: torch.Tensor, pinned: bool) -> None:
        self.memory = memory
        self.nbytes = memory.numel()
        self.pinned = pinned
        self.unused_steps = 0
        self._extents = Extents()
        self._expected: list[tuple[int, int, Sequence[Ticket]]] = []  # of free or taken ranges: start, end, until when

    def take(self, size: int) -> int | None:
        """Take a free range, and return its start; None where no free range has this size."""
        start = self._extents.take_within(size, self.nbytes)
        if start is not None:
            self.unused_steps = 0
        return start

    def give(self, start: int, size: int) -> None:
        self._extents.give(start, size)

    def expect(self, start: int, size: int, tickets: Sequence[Ticket]) -> None:
        """Record that operations run on a range until `tickets` are ready, also under its next owner."""
        self._expected.append((start, start + size, tickets))

    def waits(self, start: int, size: int) -> Sequence[Ticket]:
        """Return the tickets after which a new owner of a range may use it."""
        if not self._expected:
            return ()
        self._expected = [item for item in self._expected if not all(ticket.ready() for ticket in item[2])]
        end = start + size
        found = [tickets for begin, until, tickets in self._expected if begin < end and start < until]
        return [ticket for tickets in found for ticket in tickets if not ticket.ready()]

    def idle(self) -> bool:
        """Return whether no range is taken and no operation runs on the memory."""
        self.waits(0, 0)
        return not self._extents.end and not self._expected
