"""Calls of the units in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from actstore.auto.profiler import Sample


@dataclass
class UnitCalls:
    """Number of calls of each unit in a step, and how many of them wait for backward at once.

    Attributes
    ----------
    of : number of calls of each unit
    waiting : as in `Sample`, the most of all steps
    """

    of: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """Add the calls of a step."""
        self.of.update(sample.calls)
        for name, count in sample.waiting.items():
            self.waiting[name] = max(count, self.waiting.get(name, 0))

    def chained(self, name: str) -> int:
        """Return the number of calls that wait for one backward: 1 where each call has its own."""
        return 1 if name in self.waiting else self.of.get(name, 1)

    def share(self, name: str) -> float:
        """Return the share of its calls that wait for backward at once."""
        return self.waiting[name] / self.of[name] if name in self.waiting else 1.0

    def text(self, name: str) -> str:
        """Return the part of a kind's name that tells units by how many of their calls wait."""
        return f" {self.waiting[name]} of {self.of[name]}" if name in self.waiting else ""
