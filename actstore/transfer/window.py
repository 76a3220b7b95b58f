"""Bounds on the bytes that may be on their way at once."""

from __future__ import annotations

from collections import deque

from actstore.transfer.parcel import Parcel


class FlightWindow:
    """The parcels that leave the device for one tier, oldest first. Not thread-safe.

    Bytes count from just before the first payload is encoded until the copy has left the buffer. With several threads
    the limit can be exceeded by one parcel for each other thread that encodes at the same time.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.flights: deque[Parcel] = deque()

    def admits(self, nbytes: int, limit_nbytes: int) -> bool:
        """Return whether `nbytes` more may begin to leave. A request above the limit begins when no bytes leave."""
        return not self.nbytes or self.nbytes + nbytes <= limit_nbytes


class Lookahead:
    """The bound on bytes that come back before backward asks for them. It grows when one is late, else shrinks.

    Not thread-safe.
    """

    PATIENCE = 256  # payloads in time before the bound shrinks
    limit_nbytes = 0

    def __init__(self, most_nbytes: int) -> None:
        self.resize(most_nbytes)
        self.limit_nbytes = self._least_nbytes  # memory is taken only where a late fetch proves the need
        self.nbytes = 0  # bytes on their way, or waiting for backward
        self._in_time = 0

    def resize(self, most_nbytes: int) -> None:
        """Set the maximum that the bound can grow to."""
        self._most_nbytes = most_nbytes
        self._least_nbytes = max(1, most_nbytes // 16)
        self.limit_nbytes = min(self.limit_nbytes, most_nbytes)

    def admits(self, nbytes: int) -> bool:
        return not self.nbytes or self.nbytes + nbytes <= self.limit_nbytes

    def widen(self) -> None:
        """Grow the bound to its maximum, as many late payloads do."""
        self.limit_nbytes = self._most_nbytes

    def late(self, nbytes: int) -> None:
        """Grow the bound after a late payload of `nbytes`, so that at least two of its size fit."""
        self._in_time = 0
        self.limit_nbytes = min(self._most_nbytes, 2 * max(self.limit_nbytes, nbytes))

    def in_time(self) -> None:
        self._in_time += 1
        if self._in_time == self.PATIENCE:
            self._in_time = 0
            self.limit_nbytes = max(self._least_nbytes, self.limit_nbytes * 7 // 8)
