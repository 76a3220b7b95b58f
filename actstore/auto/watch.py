"""Checks of the steps of a plan: their time, and their size."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from actstore.auto.probes import SAME_SIZE_SHARE
from actstore.auto.profiler import Sample

MEASURED_STEPS = 4  # of a plan: its first ones, and again from its step 64, 128, 256 ... on
FIRST_RECHECK_STEP = 64
REPLAN_DEVIATION = 0.1  # of the predicted step time: a larger difference makes a new plan
SHRUNK_STEPS = 128  # smaller steps in a row make a new plan for smaller steps


def is_larger(saved: int, known: int) -> bool:
    """Return whether a step saves more bytes than steps that count as equally large as one of `known` bytes."""
    return saved > known / SAME_SIZE_SHARE


def is_news(saved: int, known: int, *, excess: bool) -> bool:
    """Return whether a step over the budget is news to a plan, which with `excess` exceeds the budget itself."""
    return not excess or is_larger(saved, known)


def underestimate(peak: float, predicted: float, saved: int, planned: int) -> float:
    """Return the bytes by which a predicted peak was too low; 0 for a step larger than planned."""
    return 0.0 if is_larger(saved, planned) else max(0.0, peak - predicted)


def deviates(step: float, predicted: float) -> bool:
    """Return whether a step's time in ms is far from the predicted one."""
    return abs(step - predicted) > REPLAN_DEVIATION * predicted


class StepTimes:
    """Measured steps of the running plan, which is made anew where they deviate from the prediction."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []  # milliseconds and saved bytes
        self._steps = 0  # with a plan
        self._measure_at = FIRST_RECHECK_STEP  # the value of `_steps` at the next measurement
        self._replan_at = 0  # the value of `_steps` from which a deviation makes a new plan

    @property
    def wanted(self) -> bool:
        """True where the next step is to be measured."""
        return len(self._samples) < MEASURED_STEPS

    def state(self) -> list[Any]:
        """Return what has been counted and measured, as JSON values."""
        return [self._steps, self._measure_at, self._replan_at, self._samples]

    def resume(self, state: list[Any]) -> None:
        """Go on as in another process."""
        self._steps, self._measure_at, self._replan_at, samples = state
        self._samples = [(total, saved) for total, saved in samples]

    def begin(self) -> None:
        """Begin a step of a plan."""
        self._steps += 1
        if self._steps >= self._measure_at:
            self._measure_at *= 2
            self.clear()

    def clear(self) -> None:
        """Forget the measured steps, because another plan runs."""
        self._samples = []

    def add(self, sample: Sample, scale: Callable[[int], float]) -> float:
        """Add a measured step, and return the median of all in ms, each scaled by its saved bytes."""
        self._samples.append((sample.total, sample.saved))
        return median(total * scale(saved) for total, saved in self._samples)

    def deviate(self, step: float, predicted: float) -> bool:
        """Return whether the median `step` asks for a new plan. It does not at each measurement: it may be noise."""
        if self.wanted or not deviates(step, predicted) or self._steps < self._replan_at:
            return False
        self._replan_at = self._measure_at
        return True


class StepSizes:
    """Steps in a row that save less than planned."""

    def __init__(self) -> None:
        self._steps = 0
        self._largest = 0

    def shrunk_to(self, saved: int, planned: int) -> int:
        """Add a step by its saved bytes. Return the largest size of many smaller steps in a row; 0 for fewer."""
        if not saved or saved >= SAME_SIZE_SHARE * planned:
            self._steps = self._largest = 0
            return 0
        self._steps, self._largest = self._steps + 1, max(self._largest, saved)
        if self._steps < SHRUNK_STEPS:
            return 0
        largest, self._steps, self._largest = self._largest, 0, 0
        return largest
