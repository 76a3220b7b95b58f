"""Measurements of a step, and the calls of its units.

Where several micro-batches wait, each starts a backward of its own: these moments are the turns of a step. In a
pipeline with several stages on one rank, the units of one stage hold most at another turn than those of the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from actstore.plan.profile import SharedBytes, UnitBytes, UnitFigures
from actstore.plan.solver.chain import most_at_once

MAX_TURNS = 4  # that a plan considers one by one


@dataclass(frozen=True)
class Sample:
    """Measurements of one step.

    Attributes
    ----------
    figures : for each unit that ran, in the order of forward; several where its calls had different decisions
    calls : number of calls of each unit
    turns : for units whose calls have a backward each, as micro-batches in a pipeline: how many of them waited for
        theirs, each time that one began
    total : milliseconds from the entry of this step to that of the next
    rest : the milliseconds of `total` outside of all units
    backward : whether backward ran
    shared : bytes that several units save; `holds` has the decisions of this step
    unread : units whose gradients have not come, because nothing reads their results: forward alone holds their bytes
    """

    figures: dict[str, list[UnitFigures]]
    calls: dict[str, int]
    total: float
    rest: float
    backward: bool
    turns: dict[str, list[int]] = field(default_factory=dict)
    shared: list[SharedBytes] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    @property
    def saved(self) -> int:
        """Bytes that plain autograd would hold in the step."""
        return sum(figures[0].total("saved") for figures in self.figures.values())


def scaled(f: UnitFigures, scale: float, share: float) -> UnitFigures:
    """Return the figures scaled to a step `scale` times as large, for a unit that runs in a `share` of steps."""
    if scale == share == 1:
        return f
    transient = int(scale * f.transient)  # not scaled by `share`: the peak when the unit runs
    scale *= share
    parts = {
        name: UnitBytes(*(int(scale * nbytes) for nbytes in (part.saved, part.held, part.host, part.disk)))
        for name, part in f.parts.items()
    }
    return replace(
        f,
        forward=scale * f.forward,
        backward=scale * f.backward,
        parts=parts,
        transient=transient,
        work_forward=scale * f.work_forward,
        work_backward=scale * f.work_backward,
    )


@dataclass
class UnitCalls:
    """Number of calls of each unit in a step, and how many of them wait for backward at once.

    Attributes
    ----------
    of : number of calls of each unit
    turns : as in `Sample`, the largest ones of all steps
    """

    of: dict[str, int] = field(default_factory=dict)
    turns: dict[str, list[int]] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """Add the calls of a step."""
        self.of.update(sample.calls)
        columns = [*_columns(self.turns), *_columns(sample.turns)]
        largest = largest_turns(columns)
        names = {**self.turns, **sample.turns}
        self.turns = {name: [column[name] for column in largest] for name in names}

    def waiting(self, name: str) -> int:
        """Return the most calls that wait at once; 0 where one backward is for all calls."""
        return max(self.turns.get(name, [0]))

    def chained(self, name: str) -> int:
        """Return the number of calls that wait for one backward: 1 where each call has its own."""
        return 1 if name in self.turns else self.of.get(name, 1)

    def share(self, name: str) -> float:
        """Return the share of its calls that wait for backward at once."""
        return self.waiting(name) / self.of[name] if name in self.turns else 1.0

    def most_at_once(self, held: Mapping[str, float]) -> float:
        """Return the peak over the turns, given the bytes of each unit while most of its calls wait."""
        return most_at_once((nbytes, self.turns.get(name, ())) for name, nbytes in held.items())

    def text(self, name: str) -> str:
        """Return the part of a kind's name that tells units by how many of their calls wait."""
        return f" {self.waiting(name)} of {self.of[name]}" if name in self.turns else ""


def _columns(turns: Mapping[str, list[int]]) -> list[dict[str, int]]:
    """Return the calls at each turn, by unit."""
    number = max(map(len, turns.values()), default=0)
    return [{name: counts[i] for name, counts in turns.items()} for i in range(number)]


def calls_at_turns(
    first: Mapping[str, int], calls: Mapping[str, int], held: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Return how many calls of each unit waited at each turn.

    Parameters
    ----------
    first : the calls of units that waited at the first turn
    calls : all calls
    held : bytes of units at each turn, which grow and shrink with the calls that wait
    """
    number = max(map(len, held.values()), default=1)
    found: dict[str, list[int]] = {}
    for name in [name for name in first if name in calls]:
        nbytes = held.get(name, [0] * number)
        most = max(nbytes)
        growth = most / nbytes[0] if nbytes[0] else 1.0
        waiting = min(calls[name], max(1, round(growth * first[name])))
        found[name] = [round(waiting * each / most) if most else waiting for each in nbytes]
    return found


def largest_turns(columns: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Return the turns at which no other one has at least as many calls of each unit, at most `MAX_TURNS`."""
    names = sorted({name for column in columns for name in column})  # ranks that plan alike need one order
    rows = sorted({tuple(column.get(name, 0) for name in names) for column in columns}, reverse=True)
    rows.sort(key=sum, reverse=True)
    kept: list[tuple[int, ...]] = []
    for row in rows:
        if not any(all(a >= b for a, b in zip(other, row, strict=True)) for other in kept):
            kept.append(row)
    if len(kept) > MAX_TURNS:  # the last ones as one turn that has the most of them all
        kept[MAX_TURNS - 1 :] = [tuple(map(max, *kept[MAX_TURNS - 1 :]))]
    return [dict(zip(names, row, strict=True)) for row in kept]
