"""`measure_gradient_error`: the error of the step's gradients under lossy payloads, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actstore.accuracy.influence.effect import GradientEffect, SiteEffect
from actstore.check.result import PRINTED_ROWS
from actstore.check.run import Copies, Runner, read_leaves
from actstore.errors import ConfigError, StateError
from actstore.policy.decision import policy_text
from actstore.rerun.state import ModelState
from actstore.session.activation_store import ActivationStore


@dataclass(frozen=True)
class WeightDeviation:
    """Deviation of one weight's gradient from the exact one.

    Attributes
    ----------
    norm : norm of the exact gradient
    variance : variance of a draw, summed over the elements
    bias_squared : squared norm of the bias, less the variance of so few draws; chance can make it negative
    chance : that share: the variance by the number of draws
    """

    name: str
    norm: float
    variance: float
    bias_squared: float
    chance: float

    @property
    def square(self) -> float:
        """Mean squared error of a draw."""
        return max(0.0, self.variance + self.bias_squared)

    @property
    def relative_bias(self) -> float:
        return _by(math.sqrt(max(0.0, self.bias_squared)), self.norm)

    @property
    def relative_deviation(self) -> float:
        """The standard deviation of a draw by the norm."""
        return _by(math.sqrt(self.variance), self.norm)


@dataclass(frozen=True)
class SiteDeviation:
    """Deviation due to one lossy site: root mean square of the relative error of all gradients, and the prediction."""

    measured: float
    effect: SiteEffect

    @property
    def site(self) -> str:
        return self.effect.site

    @property
    def predicted(self) -> float | None:
        return None if self.effect.variance is None else math.sqrt(self.effect.variance)


@dataclass(frozen=True)
class GradientDeviation:
    """Result of `measure_gradient_error`. `str()` gives a text for people.

    Attributes
    ----------
    norm : norm of the exact gradients of all weights
    repeated : relative difference of two plain runs; nondeterministic GPU kernels make it more than 0
    weights : the deviation of each weight
    noise : the standard deviation of the gradients from batch to batch, by the norm; None for one batch
    predicted : the effect that the store predicts from one step; None where it cannot predict
    sites : the deviation of each site alone, where `each_site` requested it
    """

    policy: str
    draws: int
    norm: float
    repeated: float
    weights: tuple[WeightDeviation, ...]
    noise: float | None
    predicted: GradientEffect | None
    sites: tuple[SiteDeviation, ...] = ()

    @property
    def bias(self) -> float:
        """Norm of the bias of all gradients, by their norm; 0 where chance explains what is seen."""
        return _by(math.sqrt(max(0.0, sum(row.bias_squared for row in self.weights))), self.norm)

    @property
    def least_bias(self) -> float:
        """Least bias that this number of draws can detect, if all errors lie along one direction."""
        return _by(math.sqrt(sum(row.chance for row in self.weights)), self.norm)

    @property
    def deviation(self) -> float:
        """Standard deviation of all gradients, by their norm."""
        return _by(math.sqrt(sum(row.variance for row in self.weights)), self.norm)

    @property
    def error(self) -> float:
        """Root mean square of the error of all gradients, by their norm: bias and deviation together."""
        return _by(math.sqrt(sum(row.square for row in self.weights)), self.norm)

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's correlation of the sites' predicted and measured errors; None for fewer than 3 sites."""
        pairs = [(site.measured, site.predicted) for site in self.sites if site.predicted is not None]
        if len(pairs) < 3:
            return None
        measured, predicted = (_ranks(list(values)) for values in zip(*pairs, strict=True))
        middle = (len(pairs) - 1) / 2
        both = sum((a - middle) * (b - middle) for a, b in zip(measured, predicted, strict=True))
        return both / math.sqrt(_spread(measured) * _spread(predicted))

    def to_dict(self) -> dict[str, Any]:
        """Return all values for JSON."""
        return {
            "policy": self.policy,
            "draws": self.draws,
            "norm": self.norm,
            "repeated": self.repeated,
            "error": self.error,
            "bias": self.bias,
            "least_bias": self.least_bias,
            "deviation": self.deviation,
            "noise": self.noise,
            "predicted_deviation": None if self.predicted is None else math.sqrt(self.predicted.variance),
            "rank_correlation": self.rank_correlation,
            "weights": [
                {"name": row.name, "norm": row.norm, "bias": row.relative_bias, "deviation": row.relative_deviation}
                for row in self.weights
            ],
            "sites": [
                {"site": s.site, "measured": s.measured, "predicted": s.predicted, "reason": s.effect.reason}
                for s in self.sites
            ],
        }

    def __str__(self) -> str:
        lines = [
            f"Gradients with {self.policy}, by {self.draws} draws, relative to the exact ones:",
            f"  deviation {self.deviation:.3%}  at random, from draw to draw",
            f"  bias      {self.bias:.3%}  the same in each draw; below {self.least_bias:.3%} it may be chance",
        ]
        if self.noise is not None:
            lines.append(f"  noise     {self.noise:.3%}  of exact gradients, from batch to batch")
        if self.predicted is not None:
            lines.append(f"  predicted {math.sqrt(self.predicted.variance):.3%}  by one step, without these draws")
            lines += [f"  {missing.site}: not predicted: {missing.reason}" for missing in self.predicted.missing]
        if self.repeated:
            lines.append(f"  repeated  {self.repeated:.3%}  plain steps from the same state differ by as much")
        if self.sites:
            found = self.rank_correlation
            more = "" if found is None else f"; rank correlation {found:.2f}"
            lines += ["", f"  each site alone: measured, predicted{more}"]
            worst = sorted(self.sites, key=lambda site: -site.measured)
            names = max(len(site.site) for site in self.sites)
            lines += [
                f"  {s.site:<{names}}  {s.measured:>9.3%}  {_percent(s.predicted):>9}" for s in worst[:PRINTED_ROWS]
            ]
            lines += _left(len(worst))
        rows = sorted(self.weights, key=lambda row: -row.square)
        width = max(len(row.name) for row in rows[:PRINTED_ROWS])
        lines += ["", f"  {'gradient of':<{width}}  deviation       bias"]
        lines += [
            f"  {r.name:<{width}}  {r.relative_deviation:>9.3%}  {r.relative_bias:>9.3%}" for r in rows[:PRINTED_ROWS]
        ]
        return "\n".join([*lines, *_left(len(rows))])


def _left(count: int) -> list[str]:
    return [f"  and {count - PRINTED_ROWS} more with smaller errors"] if count > PRINTED_ROWS else []


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"


def _by(part: float, whole: float) -> float:
    return part / whole if whole else 0.0 if not part else math.inf


def _spread(ranks: list[float]) -> float:
    middle = (len(ranks) - 1) / 2
    return sum((rank - middle) ** 2 for rank in ranks) or math.inf


def _ranks(values: list[float]) -> list[float]:
    """Return the rank of each value; equal values share their mean rank."""
    order = sorted(values)
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]


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
    """Run a training step without the store and `draws` times with it, to measure bias and variance of gradients.

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
        raise ConfigError(f"draws={draws!r}: must be 2 or more, because one draw cannot separate bias from variance.")
    named, leaves = read_leaves("measure_gradient_error", store, inputs)
    with _without_gradients(leaves.values()), ModelState(store.model, named.values(), stateful) as state:
        runner = Runner(step, store, leaves, state)
        runner.plain()  # the first step of a process may choose other kernels than later ones
        exact = runner.plain().gradients
        repeated = _relative(runner.plain().gradients, exact)
        if not repeated <= MAX_REPEAT_ERROR:
            raise StateError(
                f"two plain runs of the step from the same state differ by {repeated:.2g} of the gradients' norm. "
                "So errors of lossy payloads cannot be measured. Make the step use the same batch each time, and give "
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
