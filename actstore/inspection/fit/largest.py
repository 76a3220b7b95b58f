"""Search for the largest size whose step fits into a memory."""

from __future__ import annotations

from collections.abc import Callable

MOST_SIZE = 1 << 24
GROWTH = 8  # the most that one guess exceeds the largest size that fits


def largest(needed: Callable[[int], int], limit: int, start: int, at_start: int) -> int:
    """Return the largest size that needs at most `limit` bytes, where more size needs more; 0 where 1 does not fit.

    Parameters
    ----------
    needed : bytes of a size
    start, at_start : a size, and the bytes that it needs
    """
    known = {start: at_start}
    low, high = (start, MOST_SIZE + 1) if at_start <= limit else (0, start)
    while high - low > 1:
        guess = min(max(_line(known, limit, low), low + 1), high - 1, max(1, low) * GROWTH)
        known[guess] = needed(guess)
        if known[guess] <= limit:
            low = guess
        else:
            high = guess
    return low


def _line(known: dict[int, int], limit: int, low: int) -> int:
    """Return where the line through the two known sizes nearest to the limit meets it."""
    near = sorted(known, key=lambda size: abs(known[size] - limit))[:2]
    if len(near) < 2:
        return max(2 * low, near[0] // 2)
    (a, b) = sorted(near)
    slope = (known[b] - known[a]) / (b - a)
    return int(a + (limit - known[a]) / slope) if slope > 0 else 2 * low
