"""Idle times of a link between the copies of a step, and the bytes in transit that would have filled them."""

from __future__ import annotations

from bisect import bisect_right


class Bursts:
    """Copies back of one step: gaps between them, and the stalls of compute. Times are in ns."""

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes  # bound on bytes in transit during that step
        self.gaps: list[tuple[int, int]] = []  # when each begins, and how long it is
        self.stalls: list[tuple[int, int]] = []
        self._end = 0  # of the last copy
        self._busy = 0
        self._nbytes = 0

    def copied(self, begin: int, end: int, nbytes: int) -> None:
        if self._end and begin > self._end:
            self.gaps.append((self._end, begin - self._end))
        self._end = end
        self._busy += end - begin
        self._nbytes += nbytes

    def wanted_nbytes(self) -> int:
        """Return the bound that fills the longest gaps, as far as compute waits between one and the next."""
        longest = max((ns for _, ns in self.gaps), default=0)
        starts = [at for at, ns in self.gaps if 2 * ns >= longest]
        waits = [0] * (len(starts) + 1)
        for at, ns in self.stalls:
            waits[bisect_right(starts, at)] += ns
        return self.limit_nbytes + min(longest, max(waits[1:], default=0)) * self._nbytes // max(1, self._busy)
