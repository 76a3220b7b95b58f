"""What a store did with the last forward."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from actstore.units import format_nbytes

if TYPE_CHECKING:
    from actstore.ledger import Ledger


@dataclass(frozen=True)
class SiteReport:
    """The figures of one site; all sizes in bytes, meanings as in `Report`."""

    site: str
    decision: str
    note: str
    tensors: int
    saved_bytes: int
    stored_bytes: int
    held_bytes: int
    peak_held_bytes: int
    live_bytes: int


@dataclass(frozen=True)
class Report:
    """The figures of one store; all sizes in bytes.

    Attributes
    ----------
    saved_bytes : what plain autograd would hold for the last forward: each storage once, parameters excluded
    stored_bytes : payloads made in the last forward, in any medium
    held_bytes : held on the compute device when the last forward ended
    peak_held_bytes : high-water of that since the last forward began, with what recomputation and decoding add
    live_bytes : held now, in any medium. Small tensors that are kept are accounted for by calls of their module: they
        count as held until the last of one call is gone, and a storage that two modules save belongs to the first.
    sites : the same for each site that saved something, in the order of first use
    """

    saved_bytes: int
    stored_bytes: int
    held_bytes: int
    peak_held_bytes: int
    live_bytes: int
    sites: tuple[SiteReport, ...]

    @classmethod
    def of(cls, ledger: Ledger) -> Report:
        sites = tuple(
            SiteReport(
                site=str(account.site),
                decision=account.where,
                note=account.note,
                tensors=account.count,
                saved_bytes=account.saved,
                stored_bytes=account.stored,
                held_bytes=account.held_at_exit,
                peak_held_bytes=account.peak,
                live_bytes=account.held + account.away,
            )
            for account in ledger.accounts()
            if account.count or account.saved or account.held or account.away
        )
        return cls(
            saved_bytes=sum(site.saved_bytes for site in sites),
            stored_bytes=sum(site.stored_bytes for site in sites),
            held_bytes=ledger.held_at_exit,
            peak_held_bytes=ledger.peak,
            live_bytes=sum(site.live_bytes for site in sites),
            sites=sites,
        )

    def to_json(self) -> str:
        """All figures as one JSON object, under the names of the attributes."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        """A table of the modules, with the sites of each added up, and the totals."""
        rows: dict[tuple[str, str, str], list[int]] = {}
        for site in self.sites:
            key = (site.site.split("[")[0], site.decision, site.note)
            row = rows.setdefault(key, [0] * 5)
            figures = (site.tensors, site.saved_bytes, site.stored_bytes, site.held_bytes, site.live_bytes)
            rows[key] = [a + b for a, b in zip(row, figures, strict=True)]
        lines: list[tuple[str, ...]] = [("site", "tensors", "saved", "stored", "held", "live", "decision")]
        for (name, decision, note), (tensors, *sizes) in rows.items():
            if any(sizes):
                text = f"{decision or 'keep'}{f' ({note})' if note else ''}"
                lines.append((name, str(tensors), *map(format_nbytes, sizes), text))
        totals = (self.saved_bytes, self.stored_bytes, self.held_bytes, self.live_bytes)
        lines.append(("total", str(sum(s.tensors for s in self.sites)), *map(format_nbytes, totals), ""))
        widths = [max(len(line[i]) for line in lines) for i in range(6)]
        table = "\n".join(
            "  ".join([line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, 6)), line[6]]).rstrip()
            for line in lines
        )
        held = (
            f"{self.held_bytes / self.saved_bytes:.1%} of what plain autograd holds" if self.saved_bytes else "nothing"
        )
        return f"{table}\nheld at the end of forward: {held}; peak over the step {format_nbytes(self.peak_held_bytes)}"
