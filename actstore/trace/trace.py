"""A bounded record of events."""

from __future__ import annotations

from collections import deque
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from actstore.errors import ConfigError
from actstore.trace.event import Event, Kind

if TYPE_CHECKING:
    from actstore.trace.summary import Summary

LIMIT = 1_000_000  # events; about 280 bytes each


class Trace:
    """The last `limit` events. Thread-safe; `add` takes no lock, and so is safe in finalizers.

    Parameters
    ----------
    limit : maximum of events; beyond it the oldest are dropped, and `lost` counts them
    device : the device that the store works for, as text

    Raises
    ------
    ConfigError : `limit` is less than 1
    """

    def __init__(self, limit: int = LIMIT, device: str = "") -> None:
        if limit < 1:
            raise ConfigError(f"Trace(limit={limit}): must be 1 or more. Leave Trace() out to keep no event.")
        self.limit = limit
        self.device = device
        self._claimed = False
        self._lost_before = 0  # in the trace that this one was read from
        self._numbers = count(1)
        self._rows: deque[tuple[int, Kind, int, int, object, int, str, int, str]] = deque(maxlen=limit)

    def _claim(self) -> None:
        """Claim the trace for one store, which alone may write to it.

        Raises
        ------
        ConfigError : another store writes here already
        """
        if self._claimed:
            raise ConfigError("Trace(): is the trace of another store. Give each store its own: observe=[Trace()].")
        self._claimed = True

    def begin(self, device: str) -> None:
        """Note the device of the events, unless one is noted already."""
        self.device = self.device or device

    def add(
        self,
        kind: Kind,
        begin_ns: int,
        end_ns: int,
        site: object = "",
        step: int = 0,
        tier: str = "",
        nbytes: int = 0,
        note: str = "",
    ) -> None:
        """Record an event, in any order of time. `site` becomes text when it is read: it stays alive until then."""
        self._rows.append((next(self._numbers), kind, begin_ns, end_ns, site, step, tier, nbytes, note))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lost(self) -> int:
        """Number of events that were dropped."""
        rows = self._rows.copy()
        recorded = max(row[0] for row in rows) if len(rows) == self.limit else len(rows)
        return self._lost_before + recorded - len(rows)

    def events(self, step: int | None = None) -> list[Event]:
        """Return the events of one step or of all, in the order of their recording."""
        rows = self._rows.copy()  # atomic: an iteration fails when another thread appends meanwhile
        return [
            Event(kind, begin, end, str(site), number, tier, nbytes, note)
            for _, kind, begin, end, site, number, tier, nbytes, note in rows
            if step is None or number == step
        ]

    def steps(self) -> list[int]:
        """Return the numbers of the steps that have events, in order."""
        return sorted({row[5] for row in self._rows.copy()})

    def last_step(self) -> int | None:
        """Return the last step with a forward and a backward, else the last step; None for an empty trace."""
        seen: dict[int, set[str]] = {}
        for row in self._rows.copy():
            seen.setdefault(row[5], set()).add(row[1])
        whole = [step for step, kinds in seen.items() if {"forward", "backward"} <= kinds]
        return max(whole or seen, default=None)

    def summary(self, step: int | None = None) -> Summary:
        """Return the figures of one step or of all."""
        from actstore.trace.summary import Summary

        return Summary.of(self.events(step))

    def write(self, path: str | Path) -> None:
        """Write all events as NDJSON: a line about the file, then a line for each event.

        Raises
        ------
        ConfigError : the file cannot be written
        """
        from actstore.trace import ndjson

        ndjson.write(Path(path), self.events(), device=self.device, lost=self.lost)

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read what `write` wrote. Nothing in the file is executed.

        Raises
        ------
        ConfigError : the file cannot be opened
        PayloadError : the file is not a complete trace; `path` and `line` say where
        """
        from actstore.trace import ndjson

        header, events = ndjson.read(Path(path))
        trace = cls(limit=max(LIMIT, len(events)), device=header.device)
        trace._lost_before = header.lost
        for event in events:
            trace.add(*event)
        return trace

    def to_chrome(self, path: str | Path) -> None:
        """Write all events in the Chrome trace format, for ui.perfetto.dev and chrome://tracing.

        Raises
        ------
        ConfigError : the file cannot be written
        """
        from actstore.trace import chrome

        chrome.write(Path(path), self.events(), device=self.device)
