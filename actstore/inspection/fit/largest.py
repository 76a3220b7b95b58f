"""Search for the largest size whose step fits into a memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actstore.inspection.fit.memory import Label
from actstore.inspection.fit.plans import quick_row_of
from actstore.inspection.fit.result import FitRow
from actstore.inspection.fit.steps import PLAIN, DrySteps

FIXED: tuple[Label, ...] = ("weights", "gradients", "optimizer")  # bytes that depend on no size
ERROR_LENGTH = 160


class SizeTrials:
    """Search for the largest value of one argument.

    Parameters
    ----------
    steps : makes the step, with a value for the argument `name`
    limit : bytes of the memory
    start : the value of the rows
    """

    def __init__(self, steps: Callable[..., DrySteps], name: str, limit: int, start: int) -> None:
        self._steps = steps
        self._name = name
        self._limit = limit
        self._start = start
        self._failed: dict[int, str] = {}  # errors of the plain step, which it has under each policy

    def largest(self, row: FitRow) -> tuple[int, Label | None, str | None]:
        """Return the largest value that fits under the policy of a row, and what the next one meets.

        That is the largest part of its peak, or the error that the step raises, or neither after `MOST_SIZE`.
        """
        failed, parts = dict(self._failed), {self._start: row.largest}

        def needed(value: int) -> int | None:
            if value >= min(failed, default=value + 1):
                return None
            try:
                with _quiet():
                    tried = quick_row_of(self._steps(**{self._name: value}), row.policy, self._limit)
            except Exception as error:  # of the user's code, such as a context that exceeds a table
                failed[value] = f"{type(error).__name__}: {error}".partition("\n")[0][:ERROR_LENGTH]
                return None
            parts[value] = tried.largest
            return tried.peak_bytes

        fixed = sum(row.at_peak.get(label, 0) for label in FIXED)
        at_start = row.peak_bytes if row.frugal_bytes is None else row.frugal_bytes
        found = largest(needed, self._limit, self._start, at_start, fixed)
        if row.policy == PLAIN:
            self._failed = failed
        return found, parts.get(found + 1), failed.get(found + 1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what PyTorch logs about an error that it raises, too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


MOST_SIZE = 1 << 24
GROWTH = 8  # factor between guesses, until one does not fit
POINTS = 3  # memory is at most quadratic in a context
PATIENCE = 2  # guesses that leave most of the range, before one in its middle


def largest(needed: Callable[[int], int | None], limit: int, start: int, at_start: int, fixed: int = 0) -> int:
    """Return the largest size that needs at most `limit` bytes, where more size needs more; 0 where 1 does not fit.

    It was tried, or is `start`; so was the next one, which does not fit. With a slow disk a larger one may fit again.

    Parameters
    ----------
    needed : bytes of a size; None where the step fails, as it then does at each larger size
    start, at_start : a size, and the bytes that it needs
    fixed : about the bytes that any size needs
    """
    known = {0: fixed, start: at_start}
    low, high = (start, MOST_SIZE + 1) if at_start <= limit else (0, start)
    poor = 0
    while high - low > 1:
        middle = (low + high) // 2 if high <= MOST_SIZE else min(2 * low, MOST_SIZE)
        if is_middle := poor == PATIENCE:
            guess = middle
        else:
            near = sorted(known, key=lambda size: (size not in (low, high), abs(known[size] - limit)))[:POINTS]
            end = high if high <= MOST_SIZE else min(high, low * GROWTH + 1)
            guess = max(low + 1, _meeting([(size, known[size]) for size in near], limit, low, end))
            if high <= MOST_SIZE and high not in known:  # it fails, and so may those before it
                guess = min(guess, middle)
        before = low, high
        nbytes = needed(guess)
        if nbytes is not None:
            known[guess] = nbytes
        if len(known) > POINTS:
            known.pop(0, None)  # no longer needed: three sizes were tried
        if nbytes is not None and nbytes <= limit:
            low = guess
        else:
            high = guess
        is_good = low >= 2 * before[0] > 0 or 2 * (high - low) <= before[1] - before[0]
        poor = 0 if is_good or is_middle else poor + 1
    return low


def _meeting(points: list[tuple[int, int]], limit: int, low: int, high: int) -> int:
    """Return the largest size from `low` to below `high` where the polynomial through `points` is at most `limit`."""

    def nbytes(size: int) -> float:
        total = 0.0
        for at, value in points:
            weight = float(value)
            for other, _ in points:
                if other != at:
                    weight *= (size - other) / (at - other)
            total += weight
        return total

    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if nbytes(middle) <= limit else (low, middle)
    return low
