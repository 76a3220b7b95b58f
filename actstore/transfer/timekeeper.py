"""Durations of copies and stalls, booked once the device has completed them."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from time import perf_counter_ns
from typing import NamedTuple

from actstore.base.ledger import Account, Ledger
from actstore.base.ticket import Ticket
from actstore.trace import Kind, Trace


class Bursts:
    """Copies back of one step: gaps between them, and the stalls of compute. Times are in ns."""

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes  # bound on bytes in transit during that step
        self.gaps: list[tuple[int, int]] = []  # when each begins, and how long it is
        self.stalls: list[tuple[int, int]] = []
        self._end = 0  # of the last copy
        self._busy = 0
        self._nbytes = 0

    def copied(self, begin: int, end: int, nbytes: int) -> None:
        if self._end and begin > self._end:
            self.gaps.append((self._end, begin - self._end))
        self._end = end
        self._busy += end - begin
        self._nbytes += nbytes

    def wanted_nbytes(self) -> int:
        """Return the bound that fills the longest gaps, as far as compute waits between one and the next."""
        longest = max((ns for _, ns in self.gaps), default=0)
        starts = [at for at, ns in self.gaps if 2 * ns >= longest]
        waits = [0] * (len(starts) + 1)
        for at, ns in self.stalls:
            waits[bisect_right(starts, at)] += ns
        return self.limit_nbytes + min(longest, max(waits[1:], default=0)) * self._nbytes // max(1, self._busy)


_BOOKED = ("offload", "fetch", "stall")

LATE_NS = 20_000  # a shorter stall is the cost of an event, not of a late copy


class _Pending(NamedTuple):
    kind: Kind
    ticket: Ticket
    tier: str
    step: int
    shares: list[tuple[Account, int]]
    judged: bool
    for_room: bool


class Timekeeper:
    """Accountant of durations, which it splits between sites in proportion to their bytes. Not thread-safe.

    The host does not wait: `settle` books each span that is known.
    """

    def __init__(self, ledger: Ledger, trace: Trace | None) -> None:
        self._ledger = ledger
        self._trace = trace
        self._pending: dict[Kind, deque[_Pending]] = {}  # each kind completes in order
        self.step = 0  # of training, for the trace
        self._bursts: dict[int, Bursts] = {}  # of the last steps
        self._left_ns = 0

    def expect(
        self,
        kind: Kind,
        ticket: Ticket,
        tier: str,
        shares: list[tuple[Account, int]],
        *,
        judged: bool = False,
        for_room: bool = False,
    ) -> None:
        """Queue an operation, to be booked once its ticket is complete.

        Parameters
        ----------
        shares : the accounts and sizes of the payloads that it concerns
        judged : whether the operation's duration shows that a fetch was late
        for_room : whether it is a stall until a copy out has left its memory
        """
        self._pending.setdefault(kind, deque()).append(
            _Pending(kind, ticket, tier, self.step, shares, judged, for_room)
        )

    def start(self, step: int, limit_nbytes: int, *, changed: bool) -> int:
        """Begin a step; return the bound on bytes in transit that the copies back of the last two ask for.

        Parameters
        ----------
        limit_nbytes : the bound in this step
        changed : whether the last step had another order than the one before: it asks for nothing
        """
        if changed:
            self._bursts.pop(self.step, None)
        self._bursts = {last: bursts for last, bursts in self._bursts.items() if last >= self.step - 1}
        wanted = max((bursts.wanted_nbytes() for bursts in self._bursts.values()), default=0)
        self.step = step
        self._bursts[step] = Bursts(limit_nbytes)
        return wanted

    def left_ns(self) -> int:
        """Return the end of the last copy out, on the clock of `perf_counter_ns`; the present while one runs."""
        return perf_counter_ns() if self._pending.get("offload") else self._left_ns

    def settle(self) -> list[tuple[bool, int]]:
        """Record the operations that are complete. Returns for each judged fetch whether it was late, and its bytes."""
        late = []
        for pending in self._pending.values():
            while pending and pending[0].ticket.ready():
                found = pending.popleft()
                if (span := found.ticket.span()) is not None:  # None: the operation failed
                    self._book(found, *span)
                    if found.judged:
                        account, nbytes = found.shares[0]
                        late.append((span[1] - span[0] > LATE_NS, nbytes))
                        self._ledger.judge(account, late=late[-1][0])
        return late

    def _book(self, found: _Pending, begin: int, end: int) -> None:
        kind, shares = found.kind, found.shares
        total = sum(nbytes for _, nbytes in shares)
        if kind == "offload":
            self._left_ns = max(self._left_ns, end)
        bursts = self._bursts.get(found.step)
        if bursts is not None and kind == "fetch":
            bursts.copied(begin, end, total)
        elif bursts is not None and kind == "stall" and not found.for_room:
            bursts.stalls.append((begin, end - begin))
        if kind in _BOOKED:
            booked = "room" if found.for_room else kind
            for account, nbytes in shares:
                self._ledger.time(account, booked, (end - begin) * nbytes // max(1, total))
        if self._trace is not None:
            site = "" if not shares else shares[0][0].site if len(shares) == 1 else _Sites(shares)
            self._trace.add(kind, begin, end, site, found.step, found.tier, total)


class _Sites:
    """The sites of one parcel, which become text when they are read."""

    def __init__(self, shares: list[tuple[Account, int]]) -> None:
        self._first = shares[0][0].site
        self._more = len(shares) - 1

    def __str__(self) -> str:
        return f"{self._first} and {self._more} more"
