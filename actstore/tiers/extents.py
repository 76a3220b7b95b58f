"""Free ranges of a file, or of a segment of memory."""

from __future__ import annotations

from bisect import bisect_left, insort


class Extents:
    """First-fit allocation of byte ranges in one growing space; neighbours that are freed merge. Not thread-safe."""

    def __init__(self) -> None:
        self.end = 0  # one past the last byte in use
        self._free: list[tuple[int, int]] = []  # (start, nbytes), sorted, never adjacent

    def take(self, nbytes: int) -> int:
        """Take a range of `nbytes`, and return its start; `end` grows when no free range is large enough."""
        for i, (start, size) in enumerate(self._free):
            if size >= nbytes:
                if size == nbytes:
                    del self._free[i]
                else:
                    self._free[i] = (start + nbytes, size - nbytes)
                return start
        start = self.end
        self.end += nbytes
        return start

    def take_within(self, nbytes: int, most_nbytes: int) -> int | None:
        """Take a range as `take` does; None where `end` would grow beyond `most_nbytes`."""
        start = self.take(nbytes)
        if self.end <= most_nbytes:
            return start
        self.give(start, nbytes)
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Free a range that `take` returned."""
        i = bisect_left(self._free, (start, 0))
        if i < len(self._free) and start + nbytes == self._free[i][0]:
            nbytes += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == start:
            start, size = self._free.pop(i - 1)
            nbytes += size
        if start + nbytes == self.end:
            self.end = start
        else:
            insort(self._free, (start, nbytes))
