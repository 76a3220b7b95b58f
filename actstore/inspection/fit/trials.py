"""Trials of one argument of a step, such as its batch, with each policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actstore.inspection.fit.largest import largest
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

        That is the part with most bytes at its peak, or the error that the step raises, or neither after `MOST_SIZE`.
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
