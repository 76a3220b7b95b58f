"""The least device memory that a chain can train in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from actstore.errors import CapacityError, ConfigError
from actstore.plan.solver.chain import LayerChain, Limits, needed, useful
from actstore.plan.solver.linear import Linear
from actstore.plan.solver.tables import BACKWARD, DIRECTIONS, FORWARD, SLACK, Tables, slack
from actstore.plan.solver.timeline import Breach, Evaluation, evaluated


@dataclass(frozen=True, slots=True)
class Least:
    """A choice that needs least device memory.

    Attributes
    ----------
    device : bytes that the choice needs
    bound : no choice needs less
    evaluation : the evaluation of the choice, with `device` as limit
    direction, layer : the event of the peak
    """

    device: float
    bound: float
    evaluation: Evaluation
    direction: str
    layer: str


def least(chain: LayerChain, limits: Limits, *, within: float = inf, time_limit: float = 10.0) -> Least:
    """Find the choice with the least device memory; `limits.device` does not count.

    Parameters
    ----------
    within : most ms of a step
    time_limit : seconds for the mixed-integer program, which does not run where only device memory is limited

    Raises
    ------
    CapacityError : no choice keeps the remaining limits and `within`
    ConfigError : as `Tables`; a chain without layers; or the solver is needed, and scipy is not installed
    """
    if not chain.layers:
        raise ConfigError("a chain without layers needs no memory. Give it at least one layer.")
    tables = Tables(chain, replace(limits, device=inf))
    check_totals(tables)
    allowed = [useful(layer) for layer in chain.layers]
    choice, bound = _frugal(tables, allowed)
    evaluation = evaluated(tables, choice)
    if not evaluation.feasible or within < inf:
        choice, proven = _solved(tables, allowed, within, time_limit)
        bound = max(bound, proven)
        evaluation = evaluated(tables, choice)
    device = max(needed(tables.chain.chosen(choice))) if within == inf else _enough(tables, choice, within, bound)
    evaluation = evaluated(Tables(chain, replace(limits, device=device)), choice)
    direction, layer = evaluation.peak_event()
    return Least(device, min(bound, device), evaluation, DIRECTIONS[direction], chain.layers[layer].name)


def check_totals(tables: Tables) -> None:
    """Refuse limits of a whole step that not even the most frugal options keep.

    Raises
    ------
    CapacityError : the limit of host, disk or error cannot be kept
    """
    for name, table in (("host", tables.host), ("disk", tables.disk), ("error", tables.error)):
        allowed = getattr(tables.limits, name)
        needed = float(table.min(axis=1).sum()) if len(table) else 0.0
        if needed > allowed + slack(allowed):
            at = int(table.min(axis=1).argmax())
            name_of = tables.chain.layers[at].name
            breach = Breach(name, needed, allowed)
            raise CapacityError(
                f"every choice of options comes to at least {breach}, most of it in {name_of}. Raise the {name} limit, "
                "or give that layer an option that needs less.",
                limit=name,
                needed=needed,
                allowed=allowed,
                layer=name_of,
            )


def _frugal(tables: Tables, allowed: Sequence[Sequence[int]]) -> tuple[list[int], float]:
    """Find the choice with the least peak where only the device is limited, and that peak, by bisection.

    Under a given peak, the best choice of each layer in turn is the fitting option that holds least.
    """
    top = tables.peak[FORWARD].clip(min=tables.peak[BACKWARD])

    def under(limit: float) -> list[int] | None:
        held, choice = 0.0, []
        for i, options in enumerate(allowed):
            fitting = [o for o in options if held + top[i, o] <= limit]
            if not fitting:
                return None
            choice.append(min((tables.held[i, o], o) for o in fitting)[1])
            held += tables.held[i, choice[-1]]
        return choice

    best = [min((tables.held[i, o], o) for o in options)[1] for i, options in enumerate(allowed)]
    low, high = 0.0, max(needed(tables.chain.chosen(best)))
    while high - low > SLACK * high:
        middle = (low + high) / 2
        choice = under(middle)
        if choice is None:
            low = middle
        else:
            best, high = choice, min(middle, max(needed(tables.chain.chosen(choice))))
    return best, high


def _solved(
    tables: Tables, allowed: Sequence[Sequence[int]], within: float, time_limit: float
) -> tuple[list[int], float]:
    program = Linear(tables, allowed, timeline=isfinite(within), smallest=True, within=within)
    answer = program.integral(time_limit=time_limit, gap=1e-6)
    if answer.values is None:
        what = f"a step within {within:.6g} ms and the other limits" if within < inf else "the other limits"
        if answer.bound == inf:
            raise CapacityError(f"no choice of options keeps {what}. Raise one of them.", within=within)
        raise CapacityError(
            f"no choice that keeps {what} was found in {time_limit:g} s. Give more time.", within=within
        )
    return program.choose(answer.values), answer.bound * program.unit


def _enough(tables: Tables, choice: Sequence[int], within: float, low: float) -> float:
    """Find the least device limit under which `choice` takes at most `within` ms, by bisection on the timeline."""

    def fits(device: float) -> bool:
        found = evaluated(Tables(tables.chain, replace(tables.limits, device=device)), choice)
        return found.feasible and found.total <= within * (1 + SLACK)

    low, high = low * (1 - 1e-6), evaluated(tables, choice).device_peak
    while high - low > SLACK * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
