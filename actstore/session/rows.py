"""Rows of a report: sites, modules, and equal modules of several layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from actstore.accuracy.figures import ErrorFigures
from actstore.display.naming import joined, layer_pattern


@dataclass(frozen=True)
class SiteReport:
    """The figures of one site; all sizes in bytes, times in ms, meanings as in `Report`.

    `error` has the errors of its lossy payloads in the last sampled step; None for a site without lossy payloads.
    """

    site: str
    decision: str
    note: str
    tensors: int
    saved_bytes: int
    stored_bytes: int
    held_bytes: int
    peak_held_bytes: int
    live_bytes: int
    offload_ms: float
    fetch_ms: float
    stall_ms: float
    hits: int
    late: int
    misses: int
    error: ErrorFigures | None = None

    def as_row(self) -> ModuleReport:
        """Return the figures of a table's row."""
        decision = f"{self.decision or 'keep'}{f' ({self.note})' if self.note else ''}"
        sizes = self.saved_bytes, self.stored_bytes, self.held_bytes, self.live_bytes
        error = self.error.relative if self.error is not None and self.error.measured else None
        return ModuleReport(self.site, decision, self.tensors, *sizes, error)


@dataclass(frozen=True)
class ModuleReport:
    """The sites of one module, or of equal modules, with the same decision, added up; sizes in bytes as in `Report`.

    Attributes
    ----------
    module : its name; of equal modules ``blocks.0-31.attn``
    error : the largest relative error of these sites; None where none was measured
    modules : how many they are
    """

    module: str
    decision: str
    tensors: int
    saved: int
    stored: int
    held: int
    live: int
    error: float | None = None
    modules: int = 1

    @property
    def label(self) -> str:
        """The name, with the number of modules where they are several."""
        return self.module if self.modules == 1 else f"{self.module} x{self.modules}"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Saved, stored, held and live bytes."""
        return self.saved, self.stored, self.held, self.live


def modules(sites: Iterable[SiteReport]) -> tuple[ModuleReport, ...]:
    """Return the sites of each module added up where their decision is the same, in the order of first use."""
    groups: dict[tuple[str, str], list[ModuleReport]] = {}
    for row in (site.as_row() for site in sites):
        groups.setdefault((row.module.split("[")[0], row.decision), []).append(row)
    found = (added(module, rows) for (module, _), rows in groups.items())
    return tuple(row for row in found if any(row.sizes))


def layers(modules: Iterable[ModuleReport]) -> tuple[ModuleReport, ...]:
    """Return the modules with equal ones added up, and what holds most first.

    Equal modules have the same decision, tensors and saved bytes, and names that differ in indices only.
    """
    groups: dict[tuple[object, ...], list[ModuleReport]] = {}
    for row in modules:
        groups.setdefault((layer_pattern(row.module), row.decision, row.tensors, row.saved), []).append(row)
    found = (replace(added(joined([r.module for r in rows]), rows), modules=len(rows)) for rows in groups.values())
    return tuple(sorted(found, key=lambda row: (-row.held, -row.saved)))


def added(module: str, rows: Sequence[ModuleReport]) -> ModuleReport:
    """Return the sum of rows with one decision."""
    tensors = sum(row.tensors for row in rows)
    saved, stored, held, live = (sum(column) for column in zip(*(row.sizes for row in rows), strict=True))
    errors = [row.error for row in rows if row.error is not None]
    return ModuleReport(module, rows[0].decision, tensors, saved, stored, held, live, max(errors, default=None))
