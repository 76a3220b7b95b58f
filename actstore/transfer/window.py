"""How many bytes may be on their way at once."""

from __future__ import annotations

from collections import deque

from actstore.transfer.parcel import Parcel


class FlightWindow:
    """The parcels that leave the device for one tier, oldest first. Not thread-safe.

    Their bytes count from the moment when the first payload is about to be encoded until the copy has left the buffer.
    With several threads a limit can be exceeded by one parcel for each other thread that is encoding just then.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.flights: deque[Parcel] = deque()

    def admits(self, nbytes: int, limit_nbytes: int) -> bool:
        """Return whether `nbytes` more may begin; a request larger than the limit begins when nothing leaves."""
        return not self.nbytes or self.nbytes + nbytes <= limit_nbytes


class Lookahead:
    """How many bytes may come back before they are asked for: grows when one was late, shrinks when none is.

    Not thread-safe.
    """

    PATIENCE = 256  # payloads in time before it shrinks
    limit_nbytes = 0

    def __init__(self, most_nbytes: int) -> None:
        self.resize(most_nbytes)
        self.limit_nbytes = self._least_nbytes  # memory is taken only where it proves to be needed
        self.nbytes = 0  # on their way or waiting to be asked for
        self._in_time = 0

    def resize(self, most_nbytes: int) -> None:
        """Let it grow to so much from now on."""
        self._most_nbytes = most_nbytes
        self._least_nbytes = max(1, most_nbytes // 16)
        self.limit_nbytes = min(self.limit_nbytes, most_nbytes)

    def admits(self, nbytes: int) -> bool:
        return not self.nbytes or self.nbytes + nbytes <= self.limit_nbytes

    def late(self, nbytes: int) -> None:
        """A payload of `nbytes` came late: two of its size at least are to be on their way from now on."""
        self._in_time = 0
        self.limit_nbytes = min(self._most_nbytes, 2 * max(self.limit_nbytes, nbytes))

    def in_time(self) -> None:
        self._in_time += 1
        if self._in_time == self.PATIENCE:
            self._in_time = 0
            self.limit_nbytes = max(self._least_nbytes, self.limit_nbytes * 7 // 8)
