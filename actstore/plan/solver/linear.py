"""The choice of options as a linear program, with or without integrality.

For layer i and each direction (backward in reversed time), let z[i, o] be the choice, K the held bytes, p the bytes
queued on the device when the layer starts and d those when it ends, s the stall before it, and B the rate:

    p_i >= d_(i-1) - B s_i              K_(i-1) + p_i + sum peak z <= device
    d_i >= p_i - B (time_i + sum extra z) + sum near z              d_i >= sum near z

With a second lane, y, e, D take their place for bytes not yet on the disk, and H are the bytes waiting in host memory:

    y_i >= e_(i-1) - D s_i      e_i >= y_i - D (...) + sum far z      e_i >= sum far z
    p_i >= y_i + H - host       d_i - sum near z >= e_i - sum far z + H - host

The program leaves out the mutual slowdown of both directions at the turn; its value is a bound all the same. Limits
are variables with equal bounds: the reduced cost of a limit is the time that one more unit of it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from math import inf, isfinite
from typing import Any

import numpy as np

from actstore.plan.solver.program import Program, Terms
from actstore.plan.solver.tables import BACKWARD, FORWARD, UNLIMITED_RATE, Floats, Tables

LIMITS = ("device", "host", "disk", "error")


class Linear(Program):
    """Linear program of a chain under limits.

    Parameters
    ----------
    allowed : for each layer, the indices of the options to choose from
    timeline : whether to add the rows of time; without them stalls are free
    smallest : whether to minimize device bytes instead of time
    within : limit of a step in ms, where device bytes are minimized

    Attributes
    ----------
    unit : bytes in one unit of a variable that counts bytes
    choice : for each layer, the variable of each allowed option
    limits : the variable of each finite limit
    """

    def __init__(
        self,
        tables: Tables,
        allowed: Sequence[Sequence[int]],
        *,
        timeline: bool = True,
        smallest: bool = False,
        within: float = inf,
    ) -> None:
        super().__init__()
        self.tables = tables
        self.allowed = allowed
        largest = max((float(np.max(t, initial=0.0)) for t in (*tables.peak, tables.held, tables.near)), default=0.0)
        self.unit = largest or 1.0
        self.limits = self._limits(smallest)
        extra = tables.extra[FORWARD] + tables.extra[BACKWARD]
        self.choice = [
            [self.variable(0.0 if smallest else float(extra[i, o]), integral=1) for o in options]
            for i, options in enumerate(allowed)
        ]
        self._times: Terms = [(v, float(extra[i, o])) for i, o, v in self.cells()]
        for row in self.choice:
            self.row([(v, 1.0) for v in row], 1.0, 1.0)
        self._totals()
        self._held = self._resident()
        for direction in (FORWARD, BACKWARD):
            if timeline:
                DirectionRows(self, direction, costs=not smallest).write()
            elif "device" in self.limits:
                for i in range(len(allowed)):
                    self.memory_row(i, direction, [])
        if isfinite(within):
            self.row(self._times, -inf, within - tables.plain)

    def waits(self, cost: bool) -> int:
        """Add a variable for the milliseconds that compute waits."""
        variable = self.variable(1.0 if cost else 0.0)
        self._times.append((variable, 1.0))
        return variable

    def aggregate(self) -> None:
        """Add rows that tighten the integer program: counts of equal layers by option, and the need at the end.

        Equal layers have many choices of the same cost; a branch on a count decides for all of them at once.
        """
        alike: dict[tuple[Any, ...], list[int]] = {}
        for i, layer in enumerate(self.tables.chain.layers):
            numbers = tuple(astuple(layer.options[o])[1:] for o in self.allowed[i])
            alike.setdefault((layer.forward, layer.backward, numbers), []).append(i)
        for group in alike.values():
            if len(group) > 1:
                for k in range(len(self.allowed[group[0]])):
                    count = self.variable(integral=1, upper=len(group))
                    self.row([*((self.choice[i][k], 1.0) for i in group), (count, -1.0)], 0.0, 0.0)
        if "device" in self.limits:
            last = len(self.allowed) - 1
            held = [term for i in range(last) for term in self.chosen(self.tables.held, i, 1 / self.unit)]
            for direction in (FORWARD, BACKWARD):
                peak = self.chosen(self.tables.peak[direction], last, 1 / self.unit)
                self.row([*held, *peak, (self.limits["device"], -1.0)], -inf, 0.0)

    def times(self) -> Terms:
        """Return the terms of the time of a step beyond `plain`, in ms."""
        return self._times

    def cells(self) -> Iterable[tuple[int, int, int]]:
        """Yield (layer, option, variable) of each choice."""
        for i, (options, row) in enumerate(zip(self.allowed, self.choice, strict=True)):
            for o, v in zip(options, row, strict=True):
                yield i, o, v

    def chosen(self, table: Floats, i: int, scale: float = 1.0) -> Terms:
        """Return the terms of the value of `table` that layer `i` chooses, times `scale`."""
        return [(v, scale * float(table[i, o])) for o, v in zip(self.allowed[i], self.choice[i], strict=True)]

    def memory_row(self, i: int, direction: int, queued: Terms) -> None:
        """Require that held bytes, queued bytes and the layer's own need fit on the device."""
        held = [(self._held[i], 1.0)] if i else []
        peak = self.chosen(self.tables.peak[direction], i, 1 / self.unit)
        self.row([*held, *queued, *peak, (self.limits["device"], -1.0)], -inf, 0.0)

    def _limits(self, smallest: bool) -> dict[str, int]:
        found = {}
        for name in LIMITS:
            limit = float(getattr(self.tables.limits, name)) / (1.0 if name == "error" else self.unit)
            if smallest and name == "device":
                found[name] = self.variable(1.0, upper=limit)
            elif isfinite(limit):
                found[name] = self.variable(lower=limit, upper=limit)
        return found

    def _totals(self) -> None:
        tables = self.tables
        for name, table, unit in (
            ("host", tables.host, self.unit),
            ("disk", tables.disk, self.unit),
            ("error", tables.error, 1.0),
        ):
            if name in self.limits:
                total = self.variable()
                self.row([*self._sum(table, unit), (total, -1.0)], 0.0, 0.0)
                self.row([(total, 1.0), (self.limits[name], -1.0)], -inf, 0.0)
                if name == "host":
                    self.waiting = total

    def _sum(self, table: Floats, unit: float) -> Terms:
        return [(v, float(table[i, o]) / unit) for i, o, v in self.cells()]

    def _resident(self) -> list[int]:
        """Add the variables K_(i-1) of the bytes held when layer i starts; the first layer has none."""
        if "device" not in self.limits:
            return []
        held = [-1]
        for i in range(1, len(self.allowed)):
            held.append(self.variable())
            before = [(held[i - 1], 1.0)] if i > 1 else []
            self.row([*before, *self.chosen(self.tables.held, i - 1, 1 / self.unit), (held[i], -1.0)], 0.0, 0.0)
        return held

    def choose(self, values: Floats) -> list[int]:
        """Return the option of each layer with the largest value."""
        return [options[int(np.argmax(values[row]))] for options, row in zip(self.allowed, self.choice, strict=True)]

    def spread(self, values: Floats) -> list[int]:
        """Return options as `choose`, but carry rounding errors on to the next layer: the lanes stay evenly used."""
        carried = [0.0] * max(map(len, self.choice), default=0)
        chosen = []
        for options, row in zip(self.allowed, self.choice, strict=True):
            wanted = [carry + float(values[v]) for carry, v in zip(carried, row, strict=False)]
            pick = max(range(len(row)), key=wanted.__getitem__)
            chosen.append(options[pick])
            carried[: len(row)] = [w - (k == pick) for k, w in enumerate(wanted)]
        return chosen


class DirectionRows:
    """Rows of one direction; `costs` says whether its waits count in the cost."""

    def __init__(self, program: Linear, direction: int, *, costs: bool) -> None:
        tables = program.tables
        self.program, self.direction, self.costs = program, direction, costs
        self.near_rate, self.far_rate = tables.near_rate[direction], tables.far_rate[direction]
        self.two = tables.two_lanes
        self.staged = self.two and "host" in program.limits

    def write(self) -> None:
        program, tables = self.program, self.program.tables
        d = e = -1
        for i in range(len(program.allowed)):
            s = program.waits(self.costs) if i else -1
            p = program.variable()
            self._drained(d, s, p, self.near_rate)
            if "device" in program.limits:
                program.memory_row(i, self.direction, [(p, 1.0)])
            time = tables.compute[self.direction][i], program.chosen(tables.extra[self.direction], i)
            near = program.chosen(tables.near, i, 1 / program.unit)
            d = self._queue(p, time, near, self.near_rate)
            if self.two:
                y = program.variable()
                self._drained(e, s, y, self.far_rate)
                far = program.chosen(tables.far, i, 1 / program.unit)
                e = self._queue(y, time, far, self.far_rate)
                if self.staged:
                    self._room(y, p, [])
                    self._room(e, d, [(v, x - f) for (v, x), (_, f) in zip(near, far, strict=True)])
        self._drain(d, e)

    def _drained(self, before: int, wait: int, after: int, rate: float) -> None:
        """Require after >= before - rate wait."""
        if before >= 0 and rate < UNLIMITED_RATE:
            terms = [(before, 1.0), (wait, -rate / self.program.unit), (after, -1.0)]
            self.program.row(terms, -inf, 0.0)

    def _queue(self, start: int, time: tuple[float, Terms], arriving: Terms, rate: float) -> int:
        """Add the variable of the bytes queued at the end of a layer, with its rows."""
        program = self.program
        end = program.variable()
        program.row([*arriving, (end, -1.0)], -inf, 0.0)
        if rate < UNLIMITED_RATE:
            rate /= program.unit
            computes = {v: -rate * x for v, x in time[1]}
            terms = [(v, x + computes[v]) for v, x in arriving]
            program.row([(start, 1.0), *terms, (end, -1.0)], -inf, rate * time[0])
        return end

    def _room(self, undelivered: int, queued: int, shift: Terms) -> None:
        """Require room in host memory for the bytes that are neither on the disk nor on the device."""
        program = self.program
        terms = [(undelivered, 1.0), (queued, -1.0), *shift, (program.waiting, 1.0), (program.limits["host"], -1.0)]
        program.row(terms, -inf, 0.0)

    def _drain(self, d: int, e: int) -> None:
        program = self.program
        drain = program.waits(self.costs)
        for last, rate in ((d, self.near_rate), (e, self.far_rate)):
            if last >= 0 and rate < UNLIMITED_RATE:
                program.row([(last, program.unit / rate), (drain, -1.0)], -inf, 0.0)
