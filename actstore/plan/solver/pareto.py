"""Pareto front of step time and device memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from actstore.errors import ConfigError
from actstore.plan.solver.chain import LayerChain, Limits, useful
from actstore.plan.solver.least import least
from actstore.plan.solver.search import fastest
from actstore.plan.solver.solve import Solution, solve
from actstore.plan.solver.tables import Tables
from actstore.plan.solver.timeline import evaluated


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
