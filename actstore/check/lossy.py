"""`measure_gradient_error`: the error of the step's gradients under lossy payloads, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from actstore.accuracy.influence.effect import GradientEffect
from actstore.check.arguments import read_leaves
from actstore.check.lossy_result import GradientDeviation, SiteDeviation, WeightDeviation
from actstore.check.run import Copies, Runner
from actstore.errors import ConfigError, StateError
from actstore.policy.decision import policy_text
from actstore.rerun.state import ModelState
from actstore.session.activation_store import ActivationStore

MAX_REPEAT_ERROR = 1e-3  # a relative difference of two plain runs up to this counts as rounding


def measure_gradient_error(
    step: Callable[..., Any],
    store: ActivationStore,
    *,
    draws: int = 12,
    others: Iterable[Callable[..., Any]] = (),
    each_site: bool = False,
    inputs: Mapping[str, Tensor] | Iterable[Tensor] = (),
    stateful: Iterable[Any] = (),
) -> GradientDeviation:
    """Run a training step plainly and `draws` times with the store; separate the gradients' bias from their variance.

    Parameters
    ----------
    step : a function that runs forward and backward, as for `actstore.check_gradients`, on the same batch each time
    store : made with the model; its policy is lossy
    draws : number of runs, 2 or more; each rounds with other random numbers. The standard error of the variance of D
        independent directions is sqrt(2 / (draws - 1) / D) of it
    others : the same step on other batches, for the noise from batch to batch; each runs once, plainly
    each_site : whether to measure each lossy site alone, with the rest exact: `draws` more runs for each
    inputs : more leaf tensors whose gradients to measure
    stateful : other objects that the step changes, as for `actstore.check_gradients`

    Returns
    -------
    GradientDeviation : for each weight and for all, with the noise of batches and the prediction

    Raises
    ------
    ConfigError : the step does not fit one of the forms, or computes no gradient
    StateError : a store is active here, two plain runs differ, or a gradient is not finite

    Notes
    -----
    With d the deviation of a draw from the exact gradients, m the mean of K draws' and v the mean of |d - m|^2 over
    K - 1: v is the variance, and |m|^2 - v / K an unbiased estimate of the squared bias. Each run starts from the same
    state, which is restored at the end, as by `actstore.check_gradients`. Gradients are copied to host memory.
    """
    if draws < 2:
        raise ConfigError(f"draws={draws!r}: must be 2 or more, because one draw does not tell bias from variance.")
    named, leaves = read_leaves("measure_gradient_error", store, inputs)
    with _without_gradients(leaves.values()), ModelState(store.model, named.values(), stateful) as state:
        runner = Runner(step, store, leaves, state)
        runner.plain()  # the first step of a process may choose other kernels than later ones
        exact = runner.plain().gradients
        repeated = _relative(runner.plain().gradients, exact)
        if not repeated <= MAX_REPEAT_ERROR:
            raise StateError(
                f"two plain runs of the step from the same state differ by {repeated:.2g} of the gradients' norm. "
                "So errors of lossy payloads cannot be measured. Have the step take the same batch each time, and give "
                "its own random generators and schedulers by stateful=."
            )
        whole = _Deviations(exact)
        predicted = _predicted(runner, store)
        for _ in range(draws):
            whole.add(runner.stored().gradients)
        noise = _noise(exact, [Runner(other, store, leaves, state).plain().gradients for other in others])
        sites = _sites(runner, store, exact, predicted, draws) if each_site else ()
    norm = _norm(exact)
    return GradientDeviation(
        policy_text(store.policy),
        draws,
        norm,
        repeated,
        whole.rows(),
        None if noise is None else noise / norm,
        predicted,
        sites,
    )


@contextmanager
def _without_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Clear the gradients of the leaves, and restore them on exit."""
    found = [(leaf, leaf.grad) for leaf in leaves]
    try:
        for leaf, _ in found:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in found:
            leaf.grad = gradient


def _predicted(runner: Runner, store: ActivationStore) -> GradientEffect | None:
    """Return the effect that the store predicts from one more run."""
    store.sample_next()
    runner.stored()
    return store.report().gradients


def _sites(
    runner: Runner, store: ActivationStore, exact: Copies, predicted: GradientEffect | None, draws: int
) -> tuple[SiteDeviation, ...]:
    """Measure each site with the remaining sites exact."""
    found = []
    for effect in () if predicted is None else predicted.sites:
        deviations = _Deviations(exact)
        with store._store.lossy_only_at(effect.site):
            for _ in range(draws):
                deviations.add(runner.stored().gradients)
        square = sum(row.square for row in deviations.rows()) / _norm(exact) ** 2
        found.append(SiteDeviation(math.sqrt(square), effect))
    return tuple(found)


class _Deviations:
    """The sums of the draws' deviations from the exact gradients, in double precision on the host."""

    def __init__(self, exact: Copies) -> None:
        self._exact = exact
        self._sums = {name: [torch.zeros(x.shape, dtype=_wide(x)) for x in parts] for name, parts in exact.items()}
        self._squares = dict.fromkeys(exact, 0.0)
        self._draws = 0

    def add(self, found: Copies) -> None:
        """Add the gradients of one draw.

        Raises
        ------
        StateError : a gradient is missing or not finite
        """
        self._draws += 1
        for name, parts in self._exact.items():
            if [x.shape for x in found.get(name, ())] != [x.shape for x in parts]:
                raise StateError(f"draw {self._draws} computed no gradient of {name} of the plain step's shape.")
            for expected, x, total in zip(parts, found[name], self._sums[name], strict=True):
                away = x.to(total.dtype) - expected.to(total.dtype)
                total += away
                self._squares[name] += float(away.abs().square().sum())
            if not math.isfinite(self._squares[name]):
                raise StateError(
                    f"the gradient of {name} is not finite in draw {self._draws}, plainly or with the store. Run "
                    "actstore.check_gradients to see where that begins."
                )

    def rows(self) -> tuple[WeightDeviation, ...]:
        """Return bias and variance of each weight's gradient."""
        made = []
        for name, parts in self._exact.items():
            draws, square = self._draws, self._squares[name]
            mean = sum(float((total / draws).abs().square().sum()) for total in self._sums[name])
            variance = max(0.0, square - draws * mean) / (draws - 1)
            norm = _norm({name: parts})
            made.append(WeightDeviation(name, norm, variance, mean - variance / draws, variance / draws))
        return tuple(made)


def _noise(exact: Copies, others: list[Copies]) -> float | None:
    """Return the standard deviation of a batch's gradients, from `exact` and those of other batches."""
    if not others:
        return None
    batches, variance = [exact, *others], 0.0
    for name, parts in exact.items():
        for i, x in enumerate(parts):
            found = torch.stack([batch[name][i].to(_wide(x)) for batch in batches if name in batch])
            if len(found) > 1:
                variance += float((found - found.mean(0)).abs().square().sum()) / (len(found) - 1)
    return math.sqrt(variance)


def _relative(found: Copies, expected: Copies) -> float:
    """Return the norm of the difference by that of the expected gradients; a missing gradient raises StateError."""
    deviations = _Deviations(expected)
    deviations.add(found)
    norm = _norm(expected)
    if not norm:
        raise ConfigError("all gradients of the plain step are 0, or none exists: errors cannot be measured by them.")
    return math.sqrt(sum(deviations._squares.values())) / norm


def _norm(gradients: Copies) -> float:
    return math.sqrt(sum(float(x.to(_wide(x)).abs().square().sum()) for parts in gradients.values() for x in parts))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
