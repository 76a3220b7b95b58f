"""The best choice of options under limits, a bound on its distance from the optimum, and the front of many limits.

A ladder of methods, which ends as soon as a plan is proven good enough: everything fits; the relaxation, whose value is
a lower bound; a local search; the mixed-integer program, on the options that the relaxation's prices leave open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain as chained
from math import inf, isfinite
from time import monotonic

from actstore.base.units import format_nbytes
from actstore.errors import CapacityError, ConfigError
from actstore.plan.solver.chain import LayerChain, Limits, useful
from actstore.plan.solver.least import Least, check_totals, least
from actstore.plan.solver.linear import Linear
from actstore.plan.solver.program import Answer
from actstore.plan.solver.search import Search, fastest, starts
from actstore.plan.solver.tables import BACKWARD, FORWARD, Tables
from actstore.plan.solver.timeline import Evaluation, evaluated

MIB = 2**20
PROOF_TOLERANCE = 1e-5  # of the step: no proof goes further, as smaller violations vanish in the solver's tolerances


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice of options, with its evaluation and its bound.

    Attributes
    ----------
    choice : index of the option of each layer
    evaluation : the step under this choice
    bound : lower bound on the ms of any choice; None where unknown
    prices : ms that one more MiB saves, by limit: "device", "host", "disk"; for "error", one more unit of it
    how : the method that found the choice: "everything fits", "local search", "mixed-integer program",
        "least memory", "as before"
    """

    choice: tuple[int, ...]
    evaluation: Evaluation
    bound: float | None
    prices: dict[str, float]
    how: str

    @property
    def gap(self) -> float:
        """Largest possible distance from the optimum, as a fraction of the step; infinite without a bound."""
        if self.bound is None:
            return inf
        return max(0.0, self.evaluation.total - self.bound) / self.evaluation.total if self.evaluation.total else 0.0

    @property
    def certificate(self) -> str:
        """Prediction and bound in one line."""
        predicted = f"predicted {self.evaluation.total:.1f} ms"
        if self.bound is None:
            return f"{predicted}, no bound: scipy is not installed (pip install 'actstore[plan]')"
        return f"{predicted}, bound {self.bound:.1f} ms, within {100 * self.gap:.2f} % of optimal"


def solve(
    chain: LayerChain,
    limits: Limits,
    *,
    time_limit: float = 30.0,
    gap: float = 0.002,
    start: Sequence[int] | None = None,
) -> Solution:
    """Choose an option for each layer so that a step takes the least time within `limits`.

    Without scipy the choice comes from the local search alone, and has no bound. Deterministic as long as the time
    limit is not reached. Thread-safe.

    Parameters
    ----------
    time_limit : seconds for search and solver together; the relaxation comes on top
    gap : fraction of the step; the ladder ends with a plan that is proven to be as near to the optimum
    start : a choice to begin the search from, besides its own

    Raises
    ------
    CapacityError : no choice keeps the limits; the error gives the least possible device memory, and the layer
        that needs it
    ConfigError : as `Tables`
    """
    tables = Tables(chain, limits)
    check_totals(tables)
    allowed = [useful(layer) for layer in chain.layers]
    return _Ladder(tables, allowed, monotonic() + time_limit, gap).run(start)


class _Ladder:
    def __init__(self, tables: Tables, allowed: list[list[int]], deadline: float, gap: float) -> None:
        self.tables, self.allowed, self.deadline, self.gap = tables, allowed, deadline, gap
        self.bound: float | None = None
        self.best: tuple[float, tuple[int, ...]] | None = None
        self.prices: dict[str, float] = {}
        self.how = ""

    def run(self, start: Sequence[int] | None) -> Solution:
        tables = self.tables
        extra = tables.extra[FORWARD] + tables.extra[BACKWARD]
        plain = fastest(tables, self.allowed)
        floor = tables.plain + sum(float(extra[i, o]) for i, o in enumerate(plain))
        if self._offer(plain, "everything fits") and self._total() <= floor * (1 + PROOF_TOLERANCE):
            self.bound, self.prices = floor, dict.fromkeys(self._limited(), 0.0)
            return self._solution()
        relaxation = self._relax(floor) if find_spec("scipy") else None
        self._search(relaxation, start)
        if relaxation is not None and not self._near():
            self._integral(relaxation)
        if self.best is None:
            raise self._refusal()
        return self._solution()

    def _limited(self) -> list[str]:
        return [name for name in ("device", "host", "disk", "error") if isfinite(getattr(self.tables.limits, name))]

    def _total(self) -> float:
        return inf if self.best is None else self.best[0]

    def _near(self) -> bool:
        if self.best is None or self.bound is None:
            return False
        return self._total() - self.bound <= max(self.gap, PROOF_TOLERANCE) * self._total()

    def _offer(self, choice: Sequence[int], how: str) -> bool:
        """Take a choice if it keeps all limits and is the fastest so far; return whether it keeps them."""
        found = evaluated(self.tables, choice)
        if found.feasible and found.total < self._total():
            self.best, self.how = (found.total, tuple(choice)), how
        return found.feasible

    def _relax(self, floor: float) -> tuple[Linear, Answer] | None:
        program = Linear(self.tables, self.allowed)
        answer = program.relaxed()
        if answer.bound == inf:
            raise self._refusal()
        if answer.values is None or answer.reduced is None:  # the solver gave up
            self.bound = floor
            return None
        self.bound = max(floor, answer.bound + self.tables.plain)
        for name, variable in program.limits.items():
            unit = 1.0 if name == "error" else MIB / program.unit
            self.prices[name] = max(0.0, -float(answer.reduced[variable])) * unit
        return program, answer

    def _search(self, relaxation: tuple[Linear, Answer] | None, start: Sequence[int] | None) -> None:
        begin = monotonic()
        share = 0.4 if relaxation is not None else 1.0  # of the time; the solver has the rest
        search = Search(self.tables, self.allowed, begin + share * (self.deadline - begin))
        first = []
        if relaxation is not None and relaxation[1].values is not None:
            program, values = relaxation[0], relaxation[1].values
            first = [program.spread(values), program.choose(values)]
        first += [list(start)] if start is not None else []
        for choice in chained(first, starts(self.tables, self.allowed)):  # those of `starts` only where needed
            found = search.improve(choice)
            if found is not None:
                self._offer(found[0], "local search")
            if self._near() or search.late:
                return

    def _integral(self, relaxation: tuple[Linear, Answer]) -> None:
        """Search for a choice that is faster than the best by more than the gap. If none exists, that is a bound."""
        program, answer = relaxation
        plain, total = self.tables.plain, self._total()
        open_ = self._open(program, answer, total)
        smaller = Linear(self.tables, open_)
        smaller.aggregate()
        aim = inf if self.best is None else total - max(self.gap, PROOF_TOLERANCE) * total
        if aim < inf:
            smaller.row(smaller.times(), -inf, aim - plain)
        found = smaller.integral(time_limit=max(1.0, self.deadline - monotonic()), gap=self.gap, constant=plain)
        assert self.bound is not None
        # choices left out take at least `total` ms, and choices that the row forbids at least `aim`
        self.bound = max(self.bound, min(found.bound, aim if aim < inf else total))
        if found.values is not None:
            self._offer(smaller.choose(found.values), "mixed-integer program")
        self.bound = min(self.bound, self._total())

    def _open(self, program: Linear, answer: Answer, total: float) -> list[list[int]]:
        """Return the options that a choice faster than `total` can have, by their reduced costs."""
        assert answer.reduced is not None
        least_of = answer.bound + self.tables.plain
        room = total - least_of + PROOF_TOLERANCE * max(total, 1.0)
        return [
            [o for o, v in zip(options, row, strict=True) if answer.reduced[v] <= room] or list(options)
            for options, row in zip(self.allowed, program.choice, strict=True)
        ]

    def _solution(self) -> Solution:
        assert self.best is not None
        evaluation = evaluated(self.tables, self.best[1])
        return Solution(self.best[1], evaluation, self.bound, self.prices, self.how)

    def _refusal(self) -> CapacityError:
        limits = self.tables.limits
        return refusal(least(self.tables.chain, limits), limits)


def refusal(needs: Least, limits: Limits) -> CapacityError:
    """Return the error of limits that no choice keeps, given the least that is possible."""
    if needs.device <= limits.device:
        return CapacityError(
            f"no plan within {format_nbytes(limits.device)} of device memory was found in the time limit, and "
            f"{format_nbytes(needs.device)} are enough. Give more time.",
            least=needs.device,
        )
    where = needs.layer or "the model itself and the loss"
    advice = f"or give {needs.layer} an option that needs less there" if needs.layer else "or compute the loss in parts"
    words = "at least" if needs.device <= needs.bound * (1 + 1e-6) else "about"
    missing = needs.device - limits.device
    return CapacityError(
        f"no plan fits into {format_nbytes(limits.device)} of device memory: {words} {format_nbytes(needs.device)} are "
        f"needed, in {needs.direction} of {where}. Raise the limit by {format_nbytes(missing)}, use a smaller batch, "
        f"{advice}.",
        least=needs.device,
        limit=limits.device,
        direction=needs.direction,
        layer=needs.layer,
    )


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A device limit in bytes, and the plan under it."""

    device: float
    solution: Solution


def pareto(
    chain: LayerChain, limits: Limits, points: int = 16, *, time_limit: float = 5.0, gap: float = 0.002
) -> tuple[ParetoPoint, ...]:
    """Return plans from the least possible device memory to the size that is of use, or to `limits.device`.

    Limits are evenly spaced. Each point is faster than those before it; slower ones are left out. A plan that was found
    with less memory stays wherever it is the better one.

    Parameters
    ----------
    points : number of limits to try, 2 or more
    time_limit : seconds for each of them

    Raises
    ------
    CapacityError : `limits.device` is below the least memory, or another limit cannot be kept
    ConfigError : as `Tables`; fewer than two points, or a chain without layers
    """
    if points < 2:
        raise ConfigError(f"points={points}: must be 2 or more. Use 16 for a smooth front.")
    low = least(chain, limits)
    allowed = [useful(layer) for layer in chain.layers]
    tables = Tables(chain, limits)
    high = max(low.device, min(limits.device, evaluated(tables, fastest(tables, allowed)).device_peak))
    if limits.device < low.device:
        solve(chain, limits, time_limit=time_limit, gap=gap)  # raises, with the missing bytes
    front: list[ParetoPoint] = []
    start = low.evaluation.choice
    for step in range(points):
        device = low.device + (high - low.device) * step / (points - 1)
        solution = solve(chain, replace(limits, device=device), time_limit=time_limit, gap=gap, start=start)
        start = solution.choice
        if not front or solution.evaluation.total < front[-1].solution.evaluation.total * (1 - 1e-9):
            front.append(ParetoPoint(device, solution))
        if high == low.device:
            break
    return tuple(front)
