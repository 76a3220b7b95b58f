"""Checks of the steps of a plan: their time, the bytes that they save, and the sizes of their inputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median, pstdev
from typing import Any

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from actstore.auto.probes import SAME_SIZE_SHARE
from actstore.auto.sample import Sample

MEASURED_STEPS = 4  # of a plan: its first ones, and again from its step 64, 128, 256 ... on
FIRST_RECHECK_STEP = 64
REPLAN_DEVIATION = 0.1  # of the predicted step time: a larger difference makes a new plan
SHRUNK_STEPS = 128  # smaller steps in a row make a new plan for smaller steps


def is_larger(saved: int, known: int) -> bool:
    """Return whether a step saves more bytes than steps that count as equally large as one of `known` bytes."""
    return saved > known / SAME_SIZE_SHARE


def needs_plan(saved: int, known: int, *, excess: bool) -> bool:
    """Return whether a step over the budget requires another plan; with `excess` the plan itself exceeds the budget."""
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
        """Return the counts and the measurements as JSON values."""
        return [self._steps, self._measure_at, self._replan_at, self._samples]

    def resume(self, state: list[Any]) -> None:
        """Go on as in another process."""
        *numbers, samples = state
        self._steps, self._measure_at, self._replan_at = map(int, numbers)
        self._samples = [(float(total), int(saved)) for total, saved in samples]

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


SPREAD_NOISE = 0.02  # of a step's saved bytes: decisions alone make differences up to this


class Inputs:
    """Size of the first tensor argument of the model in each step. Its numel stands for the bytes that the step saves.

    Parameters
    ----------
    larger : called with the ratio before the model runs on an input larger than in all earlier steps
    """

    def __init__(self, model: Module, larger: Callable[[float], None]) -> None:
        self._model = model
        self._larger = larger
        self._largest = self._size = 0
        self._hook: Any = None
        self._saved: deque[int] = deque(maxlen=64)

    def state(self) -> list[Any]:
        """Return the sizes as JSON values."""
        return [self._largest, self._size, list(self._saved)]

    def resume(self, state: list[Any]) -> None:
        """Take over the sizes of another process."""
        largest, size, saved = state
        self._largest, self._size = int(largest), int(size)
        self.forget()
        self._saved.extend(map(int, saved))

    def begin(self) -> None:
        """Register the hook that reads the input size of the step."""
        if not isinstance(self._model, ScriptModule) and self._model._compiled_call_impl is None:  # these take no hooks
            self._hook = self._model.register_forward_pre_hook(self._look, with_kwargs=True)

    def end(self) -> None:
        """Remove the hook."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def saved(self, nbytes: int) -> None:
        """Record the bytes that a step has saved."""
        if self._size == self._largest:
            self._saved.append(nbytes)

    @property
    def spread(self) -> float:
        """Standard deviation of the saved bytes of steps with equal inputs, as routers cause it."""
        spread = pstdev(self._saved) if self._saved else 0.0
        return spread if spread > SPREAD_NOISE * max(self._saved, default=0) else 0.0

    def forget(self) -> None:
        """Forget the saved bytes of earlier steps."""
        self._saved.clear()

    def shrink(self, share: float) -> None:
        """Scale the largest input size, as the largest steps are smaller now."""
        self._largest = int(share * self._largest)

    def _look(self, _model: Module, args: Any, kwargs: Any) -> None:
        self.end()  # only the first call of a step counts
        size = next((leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), 0)
        before, self._size, self._largest = self._largest, size, max(self._largest, size)
        if before < size:
            self._saved.clear()
        if 0 < before < size:
            self._larger(size / before)
