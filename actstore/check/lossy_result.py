"""Results of a measurement of gradient errors, as values and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from actstore.accuracy.influence.effect import GradientEffect, SiteEffect
from actstore.check.result import PRINTED_ROWS


@dataclass(frozen=True)
class WeightDeviation:
    """Deviation of one weight's gradient from the exact one.

    Attributes
    ----------
    norm : norm of the exact gradient
    variance : variance of a draw, summed over the elements
    bias_squared : squared norm of the bias, without the share of so few draws' variance; chance can make it negative
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
        """Least bias that so many draws can detect, if all errors lie along one direction."""
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
