"""Report on the stores of all ranks of a group."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from actstore.base.ledger import Ledger
from actstore.base.units import format_nbytes
from actstore.display import html
from actstore.display.text import columns
from actstore.errors import StateError
from actstore.plan.plan import Plan
from actstore.policy import Policy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


HEAD = ("rank", "peak", "of limit", "saved", "held", "stall", "policy", "decisions")
MAX_WORDS = 64  # characters of a policy's text


@dataclass(frozen=True)
class RankReport:
    """The figures of the store of one rank; sizes in bytes, times in ms, of the last forward.

    Attributes
    ----------
    rank : in the job
    saved_bytes, held_bytes, peak_held_bytes, stall_ms : as in `Report`
    limit_bytes : the budget of activations on the compute device; None for none
    policy : a digest of the policy's text, equal where ranks run the same
    decisions : of the plan, with the number of units that have each; without a plan the policy's text
    """

    rank: int
    saved_bytes: int
    held_bytes: int
    peak_held_bytes: int
    stall_ms: float
    limit_bytes: int | None
    policy: str
    decisions: str

    @classmethod
    def of(cls, rank: int, ledger: Ledger, policy: Policy, plan: Plan | None) -> RankReport:
        """Return the figures of `ledger` as they are now."""
        accounts, text, limit = ledger.accounts(), str(policy), ledger.budget.limit
        words = "; ".join(line.strip() for line in text.splitlines() if line.strip())
        if isinstance(plan, Plan):
            counts = Counter(row.decision for row in plan.rows if row.unit)
            words = ", ".join(f"{decision} {count}" for decision, count in counts.most_common())
        return cls(
            rank,
            sum(account.saved for account in accounts),
            ledger.held_at_exit,
            ledger.peak,
            sum(account.stall_ns for account in accounts) / 1e6,
            int(limit) if isfinite(limit) else None,
            sha256(text.encode()).hexdigest()[:8],
            words if len(words) <= MAX_WORDS else f"{words[: MAX_WORDS - 3]}...",
        )

    @property
    def share(self) -> float | None:
        """Peak as a share of the limit; None without a limit."""
        return self.peak_held_bytes / self.limit_bytes if self.limit_bytes else None


@dataclass(frozen=True)
class JobReport:
    """The figures of the stores of all ranks of a group: `ActivationStore.job_report` returns them on its first rank.

    Attributes
    ----------
    ranks : in their order
    """

    ranks: tuple[RankReport, ...]

    @property
    def nearest(self) -> RankReport | None:
        """The rank whose peak is the largest share of its limit; None where no rank has a limit."""
        limited = [(rank.share, rank) for rank in self.ranks if rank.share is not None]
        return max(limited, key=lambda pair: pair[0])[1] if limited else None

    @property
    def agrees(self) -> bool:
        """True where all ranks ran the same policy."""
        return len({rank.policy for rank in self.ranks}) == 1

    def to_json(self) -> str:
        """Return all figures as one JSON object, under the names of the attributes."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        return "\n".join([*columns([HEAD, *self._cells()]), *self._lines()])

    def _repr_html_(self) -> str:
        title = f"{len(self.ranks)} ranks"
        words = (len(HEAD) - 2, len(HEAD) - 1)
        table = html.table(HEAD, self._cells(), words=words)
        return html.section(title, table, *map(html.line, self._lines()))

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                str(rank.rank),
                format_nbytes(rank.peak_held_bytes),
                "" if rank.share is None else f"{rank.share:.1%}",
                format_nbytes(rank.saved_bytes),
                format_nbytes(rank.held_bytes),
                f"{rank.stall_ms:.1f} ms",
                rank.policy,
                rank.decisions,
            )
            for rank in self.ranks
        ]

    def _lines(self) -> list[str]:
        """Return the lines about all ranks."""
        near, slow = self.nearest, max(self.ranks, key=lambda rank: rank.stall_ms)
        lines = []
        if near is not None:
            lines.append(
                f"nearest to its limit: rank {near.rank}, {format_nbytes(near.peak_held_bytes)} of "
                f"{format_nbytes(near.limit_bytes or 0)}"
            )
        if slow.stall_ms:
            lines.append(f"waits longest for copies: rank {slow.rank}, {slow.stall_ms:.1f} ms")
        if not self.agrees:
            lines.append("the ranks run different policies")
        return lines


def gather(ledger: Ledger, policy: Policy, plan: Plan | None, group: ProcessGroup | None) -> JobReport | None:
    """Gather the figures of all ranks on the first one; see `ActivationStore.job_report`."""
    if not dist.is_available() or not dist.is_initialized():
        raise StateError("job_report() was called without a process group. Call report(), or init_process_group.")
    mine = RankReport.of(dist.get_rank(), ledger, policy, plan)
    first = dist.get_rank(group) == 0
    found: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    dist.gather_object(mine, found, group=group, group_dst=0)
    return None if found is None else JobReport(tuple(found))
