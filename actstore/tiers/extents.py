"""Free ranges of a file, or of a segment of memory."""

from __future__ import annotations

from bisect import bisect_left


class Extents:
    """First-fit allocation of byte ranges in one growing space; neighbors that are freed merge. Not thread-safe."""

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
        """Free a range that `take` returned. An interrupt (Ctrl-C) comes after a call: all is freed, or nothing."""
        i = bisect_left(self._free, (start, 0))
        before, behind = self._free[:i], self._free[i:]
        if behind and start + nbytes == behind[0][0]:
            nbytes += behind.pop(0)[1]
        if before and sum(before[-1]) == start:
            start, size = before.pop()
            nbytes += size
        if start + nbytes == self.end:
            self._free, self.end = before, start
        else:
            self._free = [*before, (start, nbytes), *behind]
