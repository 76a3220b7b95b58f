"""Linear programs, with integers or without, by HiGHS through scipy."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from types import ModuleType
from typing import Any

import numpy as np

from actstore.errors import ConfigError
from actstore.plan.solver.tables import Floats

Terms = list[tuple[int, float]]  # variable, coefficient


def optimizer() -> ModuleType:
    """Import and return scipy.optimize.

    Raises
    ------
    ConfigError : scipy is not installed
    """
    try:
        import scipy.optimize
    except ImportError as error:
        raise ConfigError(
            "a bound and an optimal plan need scipy, which is not installed. Run pip install 'actstore[plan]'."
        ) from error
    return scipy.optimize  # type: ignore[no-any-return]  # scipy has no annotations


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of the solver.

    Attributes
    ----------
    values : values of the variables; None where the solver found none
    bound : lower bound of the cost; -inf where the solver proved nothing, inf where no values satisfy the rows
    reduced : reduced costs of the variables, of a program without integers
    """

    values: Floats | None
    bound: float
    reduced: Floats | None = None


class Program:
    """Variables, rows and a cost to minimize. Not thread-safe."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._integral: list[int] = []
        self._entries: tuple[list[int], list[int], list[float]] = ([], [], [])  # rows, columns, values
        self._most: list[float] = []
        self._least: list[float] = []

    def variable(self, cost: float = 0.0, lower: float = 0.0, upper: float = inf, *, integral: int = 0) -> int:
        """Add a variable, and return its index."""
        self._cost.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        self._integral.append(integral)
        return len(self._cost) - 1

    def row(self, terms: Terms, least: float, most: float) -> None:
        """Add `least <= sum of terms <= most`."""
        rows, columns, values = self._entries
        for column, value in terms:
            if value:
                rows.append(len(self._most))
                columns.append(column)
                values.append(value)
        self._least.append(least)
        self._most.append(most)

    def relaxed(self) -> Answer:
        """Solve without integrality."""
        optimize = optimizer()
        matrix, least, most = self._rows()
        equal = least == most
        result = optimize.linprog(
            self._cost,
            A_ub=matrix[~equal],
            b_ub=most[~equal],
            A_eq=matrix[equal],
            b_eq=most[equal],
            bounds=np.column_stack([self._lower, self._upper]),
            method="highs",
        )
        if result.status == 2:
            return Answer(None, inf)
        if result.status != 0:
            return Answer(None, -inf)
        return Answer(result.x, float(result.fun), result.lower.marginals + result.upper.marginals)

    def integral(self, *, time_limit: float, gap: float, constant: float = 0.0) -> Answer:
        """Solve with integers.

        Parameters
        ----------
        time_limit : seconds
        gap : gap at which to stop, relative to the cost plus `constant`
        """
        optimize = optimizer()
        if constant:
            self.variable(constant, 1.0, 1.0)
        matrix, least, most = self._rows()
        result = optimize.milp(
            self._cost,
            integrality=self._integral,
            bounds=optimize.Bounds(self._lower, self._upper),
            constraints=optimize.LinearConstraint(matrix, least, most),
            options={"time_limit": time_limit, "mip_rel_gap": gap},
        )
        if result.status == 2:
            return Answer(None, inf)
        bound = getattr(result, "mip_dual_bound", None)
        return Answer(result.x, -inf if bound is None else float(bound))

    def _rows(self) -> tuple[Any, Floats, Floats]:
        from scipy.sparse import csr_array

        rows, columns, values = self._entries
        matrix = csr_array((values, (rows, columns)), shape=(len(self._most), len(self._cost)))
        return matrix, np.array(self._least), np.array(self._most)
