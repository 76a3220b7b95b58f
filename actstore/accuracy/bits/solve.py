"""The solver of bits per payload: the fewest bytes for a variance of the gradients, or the least variance for bytes.

Errors of payloads are independent, so that the variance of the weight gradients is, to first order,

    sum over payloads of  V(e**2)

with e the relative error of a payload and V its sensitivity, proportional for small errors. The problem is a
multiple-choice knapsack: one candidate for each group of payloads, the least sum of one figure, and a limit on the sum
of the other. This module computes its Lagrangian bound in floating point. Options that the bound leaves open go to the
planner's mixed-integer program, where scipy is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from math import fsum, inf, isfinite
from typing import Any, Literal, NamedTuple

import numpy as np

from actstore.accuracy.bits.payloads import Choice, SitePayload, tied
from actstore.base.units import format_nbytes
from actstore.errors import CapacityError, ConfigError
from actstore.plan.solver.program import Program, Terms

Floats = np.ndarray[Any, np.dtype[np.float64]]

PROOF_TOLERANCE = 1e-6  # of a bound: the error that the solver's own tolerances leave in its proofs
LIMIT_ROUNDING = 1e-12  # of a limit, for the rounding of sums
MAX_HALVINGS = 200
MAX_DOUBLINGS = 1100  # the whole range of a float's exponent


def least_bytes(
    payloads: Sequence[SitePayload],
    *,
    variance: float,
    per: Literal["module", "site"] = "module",
    gap: float = 1e-3,
    time_limit: float = 10.0,
) -> Choice:
    """Choose a decision per payload for the fewest bytes, with the gradients' variance at most `variance`.

    Parameters
    ----------
    payloads : payloads with their sensitivities and candidates
    variance : limit on the sum of the sensitivities at the payloads' errors, in their unit
    per : "module": payloads of one module, and modules that read one payload, share a decision, as policy text can
        express it; "site": only the readers of one payload do, and the policy is a function
    gap : fraction of the bytes; the search ends with a choice that is proven to be as near to the optimum
    time_limit : seconds for the solver

    Raises
    ------
    CapacityError : no choice has so small a variance; `least` is the least possible
    ConfigError : figures that are negative or not finite, or payloads of one group without a common candidate

    Notes
    -----
    A pure function. Deterministic as long as the time limit is not reached. Without scipy it gives the choice at the
    best Lagrangian price, filled up; the bound holds all the same.
    """
    return _choose(payloads, "bytes", variance, per, gap, time_limit)


def least_variance(
    payloads: Sequence[SitePayload],
    *,
    nbytes: float,
    per: Literal["module", "site"] = "module",
    gap: float = 1e-3,
    time_limit: float = 10.0,
) -> Choice:
    """Choose a decision per payload for the least variance, in at most `nbytes`; otherwise as `least_bytes`.

    Raises
    ------
    CapacityError : no choice takes so few bytes; `least` is the least possible
    ConfigError : as `least_bytes`
    """
    return _choose(payloads, "variance", nbytes, per, gap, time_limit)


class _CodecOption(NamedTuple):
    decision: str
    nbytes: int
    variance: float
    ms: float


def _nbytes(option: _CodecOption) -> float:
    return float(option.nbytes)


def _variance(option: _CodecOption) -> float:
    return option.variance


def _choose(
    payloads: Sequence[SitePayload],
    minimized: Literal["bytes", "variance"],
    limit: float,
    per: Literal["module", "site"],
    gap: float,
    time_limit: float,
) -> Choice:
    if not limit >= 0:
        raise ConfigError(f"{'variance' if minimized == 'bytes' else 'nbytes'}={limit!r}: must be 0 or more.")
    groups = tied(payloads, per)
    options = [_options([payloads[i] for i in group]) for group in groups]
    cost, weight = (_nbytes, _variance) if minimized == "bytes" else (_variance, _nbytes)
    least, most = fsum(min(map(weight, group)) for group in options), limit * (1 + LIMIT_ROUNDING)
    if least > most:
        raise _refusal(minimized, least, limit)
    options = [[option for option in group if weight(option) <= most] for group in options]
    costs, weights = ([[figure(option) for option in group] for group in options] for figure in (cost, weight))
    problem = _Knapsack(costs, weights, most)
    problem.relax()
    if not problem.near(gap) and find_spec("scipy"):
        problem.integral(gap, time_limit)
    chosen = [group[o] for group, o in zip(options, problem.best, strict=True)]
    decisions = {
        site: option.decision
        for group, option in zip(groups, chosen, strict=True)
        for i in group
        for site in (payloads[i].site, *payloads[i].readers)
    }
    return Choice(
        decisions,
        sum(option.nbytes for option in chosen),
        fsum(option.variance for option in chosen),
        fsum(option.ms for option in chosen),
        sum(payload.numel for payload in payloads),
        minimized,
        problem.bound,
        problem.price,
        per,
    )


def _options(payloads: Sequence[SitePayload]) -> list[_CodecOption]:
    """Return the options of payloads that share a decision, without options that another one equals or betters."""
    for payload in payloads:
        _check(payload)
    tables = [{candidate.decision: candidate for candidate in payload.candidates} for payload in payloads]
    common = [decision for decision in tables[0] if all(decision in table for table in tables)]
    if not common:
        names = ", ".join(str(payload.site) for payload in payloads)
        raise ConfigError(
            f"{names} must share a decision, and share no candidate codec. Measure the same candidates for all of "
            "them, or choose per='site'.",
            sites=tuple(payload.site for payload in payloads),
        )
    found: list[_CodecOption] = []
    for decision in common:
        rows = [table[decision] for table in tables]
        noise = fsum(payload.sensitivity.at(row.error) for payload, row in zip(payloads, rows, strict=True))
        found.append(_CodecOption(decision, sum(row.nbytes for row in rows), noise, fsum(row.ms for row in rows)))
    found.sort(key=lambda option: option[1:])
    useful: list[_CodecOption] = []
    for option in found:
        if not useful or option.variance < useful[-1].variance:
            useful.append(option)
    return useful


def _check(payload: SitePayload) -> None:
    figures = [("variance", variance) for _, variance in payload.sensitivity.points]
    figures += [(name, getattr(row, name)) for row in payload.candidates for name in ("nbytes", "error", "ms")]
    for name, value in figures:
        if not (isfinite(value) and value >= 0):
            raise ConfigError(
                f"{name}={value!r} of {payload.site}: give a finite number, 0 or more.", site=payload.site
            )


class _Knapsack:
    """One option of each group, the least sum of costs, and a limit on the sum of weights.

    Attributes
    ----------
    best : index of the option of each group
    bound : lower bound of the cost within the limit
    price : cost that one more unit of weight saves, by the relaxation
    """

    def __init__(self, costs: list[list[float]], weights: list[list[float]], limit: float) -> None:
        self.costs, self.weights = costs, weights
        self.limit = limit
        lightest = [min(zip(row, costs[i], range(len(row)), strict=True)) for i, row in enumerate(weights)]
        self.best = [option for _, _, option in lightest]
        self.bound, self.price = fsum(map(min, costs)), 0.0
        width = max(map(len, costs), default=1)
        self._cost = np.array([[*row, *[inf] * (width - len(row))] for row in costs]).reshape(len(costs), width)
        self._weight = np.array([[*row, *[0.0] * (width - len(row))] for row in weights]).reshape(len(costs), width)

    @property
    def value(self) -> float:
        """Cost of the best choice."""
        return self._sum(self.costs, self.best)

    def near(self, gap: float) -> bool:
        """Return whether the best choice is proven to be within `gap` of the optimum."""
        return self.value - self.bound <= gap * self.value

    def relax(self) -> None:
        """Find the price at which the limit is just kept, by bisection; it gives the bound, and a choice to fill up."""
        cheap = self._priced(0.0)
        if self._offer(cheap):
            return
        low, high = 0.0, max(self.bound, 1e-300) / max(self.limit, 1e-300)
        for _ in range(MAX_DOUBLINGS):
            if self._offer(choice := self._priced(high)):
                break
            low, cheap, high = high, choice, 2 * high
        for _ in range(MAX_HALVINGS):
            middle = (low + high) / 2
            if not low < middle < high or self.near(0.0):
                break
            choice = self._priced(middle)
            if self._offer(choice):
                high = middle
            else:
                low, cheap = middle, choice
        self._fill(cheap)

    def integral(self, gap: float, time_limit: float) -> None:
        """Search for a better choice among the options that the best price leaves open, and for a better bound."""
        known = self.value
        program, rows = Program(), []
        priced = self._cost + self.price * self._weight
        open_ = priced - priced.min(axis=1, keepdims=True) <= (known - self.bound) * (1 + PROOF_TOLERANCE)
        weights: Terms = []
        for i, costs in enumerate(self.costs):
            row = {o: program.variable(cost / known, integral=1) for o, cost in enumerate(costs) if open_[i, o]}
            program.row([(v, 1.0) for v in row.values()], 1.0, 1.0)
            weights += [(v, self.weights[i][o] / self.limit) for o, v in row.items()]
            rows.append(row)
        program.row(weights, -inf, 1.0)
        answer = program.integral(time_limit=time_limit, gap=max(gap, PROOF_TOLERANCE) / 2)
        if answer.values is not None:
            values = answer.values
            self._offer([max(row, key=lambda o, row=row: values[row[o]]) for row in rows])  # type: ignore[misc]
        self.bound = min(max(self.bound, min(answer.bound, 1.0) * known * (1 - PROOF_TOLERANCE)), self.value)

    def _priced(self, price: float) -> list[int]:
        """Return the cheapest options at this price of weight; of equal ones the lightest."""
        priced = self._cost + price * self._weight
        lowest = priced.min(axis=1, keepdims=True)
        bound = fsum(lowest[:, 0].tolist()) - price * self.limit
        if bound > self.bound or not self.price:
            self.bound, self.price = max(bound, self.bound), price
        return [int(o) for o in np.where(priced == lowest, self._weight, inf).argmin(axis=1)]

    def _offer(self, choice: list[int]) -> bool:
        """Take a choice if it keeps the limit and is the best so far; return whether it keeps the limit."""
        if self._sum(self.weights, choice) > self.limit:
            return False
        if self._sum(self.costs, choice) < self.value:
            self.best = choice
        return True

    def _fill(self, cheap: Sequence[int]) -> None:
        """Fill the remaining room: first toward the choice that is too heavy, then by the move that saves most."""
        choice = list(self.best)
        room = self.limit - self._sum(self.weights, choice)
        while True:
            moves = [
                (self.costs[i][old] - self.costs[i][new], i, new)
                for i, old in enumerate(choice)
                for new in {cheap[i], *range(len(self.costs[i]))}
                if self.costs[i][new] < self.costs[i][old] and self.weights[i][new] - self.weights[i][old] <= room
            ]
            if not moves:
                break
            _, i, new = max(moves)
            room -= self.weights[i][new] - self.weights[i][choice[i]]
            choice[i] = new
        self._offer(choice)

    @staticmethod
    def _sum(table: list[list[float]], choice: Sequence[int]) -> float:
        return fsum(row[o] for row, o in zip(table, choice, strict=True))


def _refusal(minimized: str, least: float, limit: float) -> CapacityError:
    """Return the error of a limit that no choice keeps."""
    if minimized == "bytes":
        return CapacityError(
            f"no choice of candidates has a variance of {limit:.3g} or less: {least:.3g} is the least that is "
            "possible. Raise the limit, or measure more exact candidates ('keep' has no error).",
            least=least,
            limit=limit,
        )
    return CapacityError(
        f"no choice of candidates fits into {format_nbytes(limit)}: {format_nbytes(least)} are the least that is "
        "possible. Raise the limit, or measure smaller candidates such as 'int2(group=256)'.",
        least=least,
        limit=limit,
    )
