"""Report on the last forward of a store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from actstore.accuracy.figures import ErrorFigures, format_error
from actstore.accuracy.influence.effect import GradientEffect
from actstore.base.units import format_nbytes
from actstore.display import html
from actstore.display.naming import joined, layer_pattern
from actstore.display.text import columns, finite
from actstore.errors import ConfigError, StateError
from actstore.policy import Keep, Rules
from actstore.session.advice import why
from actstore.session.causes import Request, Step
from actstore.session.process import ProcessMemory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from actstore.base.ledger import Account, Circumstances, Ledger

HEAD = ("tensors", "saved", "stored", "held", "live", "decision")  # after the name
SUMS = ("saved_bytes", "stored_bytes", "live_bytes", "offload_ms", "fetch_ms", "stall_ms", "hits", "late", "misses")
ERROR = "error"  # a column before the decision, if a site is lossy
MAX_ROWS = 24  # of a printed table
By = Literal["layers", "modules", "sites"]


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


@dataclass(frozen=True)
class MediumReport:
    """A tier beside the compute device: bytes reserved there now, and their peak since the last forward began."""

    tier: str
    used_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Report:
    """The figures of one store; all sizes in bytes, times in ms.

    Attributes
    ----------
    saved_bytes : bytes that plain autograd would hold for the last forward: each storage once, without parameters. A
        slice of memory without a graph, such as a batch of a data set, counts by its own extent
    stored_bytes : payloads of the last forward, in any tier
    held_bytes : bytes held on the compute device when the last forward ended: at the exit of the context, or when a
        backward inside of it began
    peak_held_bytes : peak of these since the last forward began, with the memory of recomputation and decoding
    live_bytes : bytes held now, in any tier. Small kept tensors are accounted for by calls of their module: they
        count as held until the last of one call is freed, and a storage that two modules save belongs to the first.
    offload_ms, fetch_ms : duration of the copies to other tiers and back since the last forward began, mostly beside
        compute
    stall_ms : time that compute waited for them
    hits, late, misses : payloads of other tiers that backward found on the device, on their way, or not yet fetched
    advice : findings that saved little or cost time, with cause and remedy; at most three sentences
    media : the tiers in use so far
    sites : the figures of each site that saved a tensor, in the order of first use
    gradients : predicted effect of the last sampled step's lossy payloads on its gradients; None where no payload is
        lossy, or no backward has come since
    process : memory of the process when the report was made, for a store on a CPU; None elsewhere. Comparisons of
        reports ignore it
    """

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
    advice: tuple[str, ...]
    media: tuple[MediumReport, ...]
    sites: tuple[SiteReport, ...]
    gradients: GradientEffect | None = None
    process: ProcessMemory | None = field(default=None, compare=False)

    @classmethod
    def _of(
        cls,
        ledger: Ledger,
        circumstances: Circumstances,
        errors: Mapping[Account, ErrorFigures] | None = None,
        gradients: GradientEffect | None = None,
        request: Request | None = None,
        process: ProcessMemory | None = None,
    ) -> Report:
        """Return the figures of `ledger` as they are now, with the measured `errors` and their effect.

        `request` : the user's choices, which advice respects
        """
        advice = tuple(why(Step(ledger, circumstances, request or Request(Rules([], default=Keep())))))
        sites = tuple(
            SiteReport(
                site=str(account.site),
                decision=account.where,
                note=str(account.note),
                tensors=account.count,
                saved_bytes=account.saved,
                stored_bytes=account.stored,
                held_bytes=account.held_at_exit,
                peak_held_bytes=account.peak,
                live_bytes=account.held + account.away,
                offload_ms=account.offload_ns / 1e6,
                fetch_ms=account.fetch_ns / 1e6,
                stall_ms=account.stall_ns / 1e6,
                hits=account.hits,
                late=account.late,
                misses=account.misses,
                error=None if errors is None else errors.get(account),
            )
            for account in ledger.accounts()
            if account.count or account.saved or account.held_at_exit or account.held or account.away
        )
        return cls(
            **{name: sum(getattr(site, name) for site in sites) for name in SUMS},
            held_bytes=ledger.held_at_exit,
            peak_held_bytes=ledger.peak,
            advice=advice,
            media=tuple(MediumReport(tier, now, peak) for tier, (now, peak) in sorted(ledger.media.items())),
            sites=sites,
            gradients=gradients,
            process=process,
        )

    def to_json(self) -> str:
        """Return all figures as one JSON object, under the names of the attributes; null for NaN and infinity."""
        return json.dumps(finite(asdict(self)), indent=1)

    def __str__(self) -> str:
        """Return the table of the layers, the totals and the advice."""
        return "\n".join([self.table(), *self._lines(), *self.advice])

    def table(self, by: By = "layers", most: int | None = MAX_ROWS) -> str:
        """Return a table, and its sums in the last row.

        Parameters
        ----------
        by : the rows, "layers", "modules" or "sites": as the attributes of these names
        most : number of rows that are shown; one more has the sum of the rest. None for all
        """
        return "\n".join(columns([self._head(by), *self._cells(self._rows(by), most)]))

    def _repr_html_(self) -> str:
        """Return the table of the layers as HTML for notebooks, with a bar for the held bytes of each."""
        most = max((row.held for row in self.layers), default=0) or 1
        return html.section(
            f"{format_nbytes(self.held_bytes)} held of {format_nbytes(self.saved_bytes)} saved",
            html.table(
                self._head("layers"),
                self._cells(self.layers, None),
                words=(0, len(self._head("layers")) - 1),
                bar=4,
                bars=[row.held / most for row in self.layers],
                total=True,
            ),
            *map(html.line, self._lines()),
            html.items(self.advice),
        )

    def plot(self) -> Figure:
        """Draw where the bytes of the layers wait.

        Raises
        ------
        ConfigError : matplotlib is not installed (the extra `bench`)
        StateError : no tensor was saved yet
        """
        if not self.layers:
            raise StateError("there is nothing to draw. Run a forward pass inside of the store, then plot.")
        from actstore.display.bars import Bar, picture

        def moved(row: ModuleReport) -> int:
            return max(0, row.stored - row.held) if "@" in row.decision else 0

        bars = [Bar(row.label, row.decision, max(row.saved, row.held), row.held, moved(row)) for row in self.layers]
        return picture(bars, "Where activations wait at the end of forward")

    @property
    def layers(self) -> tuple[ModuleReport, ...]:
        """Equal modules added up: those with the same decision and bytes, whose names differ in indices only.

        What holds most comes first.
        """
        return _layers(self.modules)

    @property
    def modules(self) -> tuple[ModuleReport, ...]:
        """Sites of each module added up where their decision is the same, in the order of first use."""
        return _modules(self.sites)

    @property
    def lossy(self) -> tuple[SiteReport, ...]:
        """Sites with measured errors, the largest error first."""
        sites = [site for site in self.sites if site.error is not None and site.error.measured]
        return tuple(sorted(sites, key=_relative, reverse=True))

    def _rows(self, by: By) -> Sequence[ModuleReport]:
        if by == "layers":
            return self.layers
        if by == "modules":
            return self.modules
        if by == "sites":
            return [site.as_row() for site in self.sites]
        raise ConfigError(f"by={by!r}: must be 'layers', 'modules' or 'sites'.")

    def _head(self, by: By) -> tuple[str, ...]:
        names = (*HEAD[:-1], ERROR, HEAD[-1]) if self._has_errors else HEAD
        return (by, *names)

    @property
    def _has_errors(self) -> bool:
        return any(site.error is not None for site in self.sites)

    def _cells(self, every: Sequence[ModuleReport], most: int | None) -> list[tuple[str, ...]]:
        """Return the texts of at most `most` rows, of the sum of the rest, and of the totals."""
        shown = len(every) if most is None or len(every) <= most + 1 else most
        rest, total = every[shown:], self._total()
        cells = [self._texts(row.label, row) for row in every[:shown]]
        if rest:
            words = "table(most=None) shows them"
            cells.append(self._texts(f"{len(rest)} more", replace(_added("", rest), decision=words)))
        return [*cells, self._texts("total", total)]

    def _texts(self, name: str, row: ModuleReport) -> tuple[str, ...]:
        errors = ["" if row.error is None else format_error(row.error)] if self._has_errors else []
        return (name, str(row.tensors), *map(format_nbytes, row.sizes), *errors, row.decision)

    def _total(self) -> ModuleReport:
        tensors = sum(site.tensors for site in self.sites)
        sizes = (self.saved_bytes, self.stored_bytes, self.held_bytes, self.live_bytes)
        return ModuleReport("total", "", tensors, *sizes)

    def _lines(self) -> list[str]:
        """Return the lines about the whole model."""
        held = (
            f"{self.held_bytes / self.saved_bytes:.1%} of what plain autograd holds" if self.saved_bytes else "nothing"
        )
        lines = [f"held at the end of forward: {held}; peak over the step {format_nbytes(self.peak_held_bytes)}"]
        lines += [
            f"{medium.tier}: {format_nbytes(medium.used_bytes)} now, peak {format_nbytes(medium.peak_bytes)}"
            for medium in self.media
        ]
        if self.media:
            lines.append(
                f"copies out {self.offload_ms:.1f} ms, back {self.fetch_ms:.1f} ms, compute waited "
                f"{self.stall_ms:.1f} ms; {self.hits} payloads in time, {self.late} late, {self.misses} not foreseen"
            )
        lines += self._error_lines()
        if self.gradients is not None and self.gradients.sites:
            lines.append(str(self.gradients))
        return [*lines, str(self.process)] if self.process is not None else lines

    def _error_lines(self) -> list[str]:
        """Return the lines about errors."""
        found = [site.error for site in self.sites if site.error is not None]
        lines = []
        for worst in self.lossy[:1]:
            error = worst.error
            assert error is not None
            lines.append(
                f"largest error: {worst.site} {format_error(error.relative)} ({error.decision}), "
                f"gain {error.gain:.3f}, in step {error.step}"
            )
        lost, missing = sum(error.lost for error in found), sum(error.payloads - error.measured for error in found)
        if lost:
            lines.append(f"{lost} elements came back as NaN, Inf or clipped that were not so before, or were so before")
        if missing:
            lines.append(
                f"{missing} of {sum(error.payloads for error in found)} lossy payloads were not measured: no room"
            )
        return lines


def _relative(site: SiteReport) -> float:
    return 0.0 if site.error is None else site.error.relative


def _modules(sites: Iterable[SiteReport]) -> tuple[ModuleReport, ...]:
    """Return the sites of each module added up where their decision is the same, in the order of first use."""
    groups: dict[tuple[str, str], list[ModuleReport]] = {}
    for row in (site.as_row() for site in sites):
        groups.setdefault((row.module.split("[")[0], row.decision), []).append(row)
    found = (_added(module, rows) for (module, _), rows in groups.items())
    return tuple(row for row in found if any(row.sizes))


def _layers(modules: Iterable[ModuleReport]) -> tuple[ModuleReport, ...]:
    """Return the modules with equal ones added up, and what holds most first.

    Equal modules have the same decision, tensors and saved bytes, and names that differ in indices only.
    """
    groups: dict[tuple[object, ...], list[ModuleReport]] = {}
    for row in modules:
        groups.setdefault((layer_pattern(row.module), row.decision, row.tensors, row.saved), []).append(row)
    found = (replace(_added(joined([r.module for r in rows]), rows), modules=len(rows)) for rows in groups.values())
    return tuple(sorted(found, key=lambda row: (-row.held, -row.saved)))


def _added(module: str, rows: Sequence[ModuleReport]) -> ModuleReport:
    """Return the sum of rows with one decision."""
    tensors = sum(row.tensors for row in rows)
    saved, stored, held, live = (sum(column) for column in zip(*(row.sizes for row in rows), strict=True))
    errors = [row.error for row in rows if row.error is not None]
    return ModuleReport(module, rows[0].decision, tensors, saved, stored, held, live, max(errors, default=None))
