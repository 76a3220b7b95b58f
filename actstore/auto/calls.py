"""Calls of the units in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actstore.auto.profiler import Sample
from actstore.auto.turns import largest_turns
from actstore.plan.solver.turns import most_at_once


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
        """Return the most bytes at one turn, given those of each unit while most of its calls wait."""
        return most_at_once((nbytes, self.turns.get(name, ())) for name, nbytes in held.items())

    def text(self, name: str) -> str:
        """Return the part of a kind's name that tells units by how many of their calls wait."""
        return f" {self.waiting(name)} of {self.of[name]}" if name in self.turns else ""


def _columns(turns: Mapping[str, list[int]]) -> list[dict[str, int]]:
    """Return the calls at each turn, by unit."""
    number = max(map(len, turns.values()), default=0)
    return [{name: counts[i] for name, counts in turns.items()} for i in range(number)]
