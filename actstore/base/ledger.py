"""Byte accounting: what each site saved, stored and holds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from threading import Lock
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch

from actstore.base.note import FOLLOWED
from actstore.base.reaper import Finalizer
from actstore.base.spec import Site


@dataclass(frozen=True)
class Circumstances:
    """Facts about a step on which its figures depend.

    Attributes
    ----------
    min_nbytes : smaller tensors are kept
    on_host : whether the memory of the compute device is host memory
    step_ms : length of the last step, or of the first one so far
    first_step : whether this is the first step, with no earlier one to learn from
    forward_ms : length of the last forward; 0 where it is unknown
    overrun_ms : time from the end of that forward to the end of its last copy out
    window_nbytes : limit of the bytes on their way to one tier
    bound_nbytes : limit of the bytes that waited on the device although a tier had them or was about to: the window,
        or less
    keeps_when_full : whether payloads stay on the device while the window is full
    host_nbytes, disk_nbytes : budgets of these tiers; None for no limit
    order : part of the step that differed from the step before: "forward" saved other payloads, "backward" read
        them in another order; empty where neither is known to
    """

    min_nbytes: int
    on_host: bool
    step_ms: float
    first_step: bool
    forward_ms: float = 0.0
    overrun_ms: float = 0.0
    window_nbytes: int = 0
    bound_nbytes: int = 0
    keeps_when_full: bool = False
    host_nbytes: int | None = None
    disk_nbytes: int | None = None
    order: str = ""


class Transient(NamedTuple):
    """Bytes that existed for a moment beside the held ones, when a step reached its peak.

    Attributes
    ----------
    work : "decoding", "sampling", "recomputation", "derivation" or "compiled"
    site : site of the payload or the module that the work was for; None without one
    nbytes : the transient bytes
    peak : the transient and the held bytes together
    """

    work: str
    site: Site | None
    nbytes: int
    peak: int


class Account:
    """The figures of one site, in bytes; `count` in tensors, times in ns.

    The ledger books bytes and times; the hooks note the decision, and the reason where it was not followed. `route` and
    `precedent` are caches of the store and of the hooks: here because each saved tensor finds its account first.
    """

    __slots__ = (
        "alive",
        "away",
        "count",
        "decision",
        "drawn",
        "dtype",
        "exact",
        "fetch_ns",
        "held",
        "held_at_exit",
        "hits",
        "late",
        "misses",
        "note",
        "offload_ns",
        "operator",
        "peak",
        "precedent",
        "room_ns",
        "route",
        "saved",
        "site",
        "stall_ns",
        "stored",
    )

    def __init__(self, site: Site, dtype: torch.dtype | None = None) -> None:
        self.site = site
        self.dtype = dtype  # of the first tensor; None where it is unknown
        self.saved = 0  # of new storages that plain autograd would hold
        self.stored = 0  # of the payloads made
        self.held = 0  # on the compute device now
        self.away = 0  # in host memory or on disk now
        self.peak = 0  # high-water of held since the last reset
        self.held_at_exit = 0
        self.count = 0  # tensors packed
        self.drawn = 0  # random keys taken
        self.alive = 0  # stored, while an owner other than autograd still holds the tensor at the end of forward
        self.offload_ns = 0  # copies to a tier
        self.fetch_ns = 0  # copies back from a tier
        self.stall_ns = 0  # compute waited for such copies,
        self.room_ns = 0  # of that, for copies out, which free room on the device
        self.hits = 0  # payloads that backward found on the device,
        self.late = 0  # that were still on their way to it,
        self.misses = 0  # and whose fetch had not begun
        self.exact = False  # kept because its values must come back exactly, and its codec is lossy
        self.decision: object = None  # of the policy
        self.operator = ""  # that made the last tensor, where the policy asks for it
        self.note = FOLLOWED  # why the store did not follow the decision; empty where it did
        self.route: Any = None  # the store's cache of the last tensor's tier and codec,
        self.precedent: Any = None  # and the hooks' cache of what that tensor was

    @property
    def where(self) -> str:
        """The decision, as policy text; empty before the first tensor."""
        return "" if self.decision is None else str(self.decision)


Booking = list[Any]
"""An account, its held bytes and its bytes away, which the ledger subtracts when the owner of the memory dies."""


class Claim(ref[Any]):
    """Memory that an owner holds on the compute device. Its callback is `Ledger.release`, called when the owner dies.

    A weak reference with a callback in C: no Python code runs when the owner dies, and no interrupt comes between. The
    maker of a claim sets all its attributes, and keeps it in an object other than the owner: where the collector finds
    a cycle of both, Python calls no callback.

    Attributes
    ----------
    booking : as `Ledger.add` marks it
    memory : a buffer; None once it was given back
    idle : the list of the pool that takes the buffer back
    """

    __slots__ = ("booking", "idle", "memory")

    booking: Booking
    memory: Any
    idle: list[Any]


class RoomMaker(Protocol):
    """An engine that can move bytes off the compute device."""

    def make_room(self, nbytes: int) -> None:
        """Let bytes leave the compute device, so that `nbytes` more fit."""


class DeviceBudget:
    """The limit of the bytes that may be held on the compute device, and the engines that make room for more.

    Attributes
    ----------
    limit : bytes; infinite where nothing limits them
    """

    __slots__ = ("_movers", "limit")

    def __init__(self) -> None:
        self.limit: float = inf
        self._movers: list[ref[RoomMaker]] = []

    def set(self, nbytes: float) -> None:
        """Set the limit."""
        self.limit = nbytes

    def add(self, mover: RoomMaker) -> None:
        """Ask `mover` for room from now on, for as long as it lives."""
        self._movers.append(ref(mover))

    def make_room(self, nbytes: int) -> None:
        """Let what can leave the compute device leave it, before `nbytes` more would exceed the limit."""
        for weak in self._movers:
            mover = weak()
            if mover is not None:
                mover.make_room(nbytes)

    def close(self) -> None:
        """Ask no engine for room any more."""
        self._movers.clear()


class Ledger:
    """All accounts of one store. Thread-safe; `release` is safe in finalizers, and takes effect at the next booking.

    Attributes
    ----------
    budget : the limit of the held bytes; a booking that would exceed it asks for room first
    reserve : the most transient bytes that existed beside the held ones, in the last step or in this one
    """

    def __init__(self) -> None:
        self.budget = DeviceBudget()
        self.reserve = self._transient = 0
        self._lock = Lock()
        self.gone: deque[Booking | Claim] = deque()  # appended to by finalizers at any moment
        self.release = self.gone.append  # books a booking or a claim as gone: one call in C
        self._accounts: dict[Site, Account] = {}
        self._held = 0
        self.peak = 0
        self._transient_peak: Transient | None = None
        self.held_at_exit = 0
        self.turns: list[dict[Account, int]] = []  # held bytes at each turn, and at the exit after one
        self._turned = False  # backward has begun inside of the context
        self.compiled: dict[tuple[int, int], int] = {}  # bytes that each compiled region has read at once in backward
        self.media: dict[str, list[int]] = {}  # by tier beside the device: bytes reserved now, and high-water

    def account(self, site: Site, dtype: torch.dtype | None = None) -> Account:
        """Return the account of `site`, opened at its first use, for tensors of `dtype`."""
        account = self._accounts.get(site)
        if account is None:
            account = self._accounts.setdefault(site, Account(site, dtype))
        return account

    def settle(self) -> None:
        """Subtract the memory whose owners died; buffers of claims go back to their pools."""
        with self._lock:
            self._book_gone()

    def accounts(self) -> list[Account]:
        """Return all accounts in the order of their first use, with everything booked."""
        self.settle()
        return list(self._accounts.values())

    def hold(self, account: Account, saved: int, stored: int, held: int) -> Finalizer:
        """Add bytes to an account. Return an object at whose death the `held` bytes are subtracted."""
        booking = [account, 0, 0]
        last = Finalizer(self.release, booking)
        self.add(account, saved, stored, held, booking=booking)
        return last

    def split(self, last: Finalizer, nbytes: int) -> Finalizer:
        """Return an object at whose death `nbytes` are subtracted, not at the death of `last`, made by `hold`."""
        booking: Booking = last.args[0]
        part: Booking = [booking[0], 0, 0]
        other = Finalizer(self.release, part)
        booking[1] -= nbytes  # an interrupt comes after a call: both lines, or none
        part[1] = nbytes
        return other

    def add(
        self,
        account: Account,
        saved: int,
        stored: int,
        held: int,
        away: int = 0,
        *,
        has_room: bool = False,
        booking: Booking | None = None,
    ) -> None:
        """Add bytes to an account, with room made for them unless they have it; a figure is negative where bytes leave.

        A `booking` is marked with the bytes. An interrupt (Ctrl-C) comes after a call: all is booked, or nothing.
        """
        if held > 0 and self._held + held > self.budget.limit and not has_room:
            self.budget.make_room(held)
        with self._lock:
            if self.gone:
                self._book_gone()
            account.saved += saved
            account.stored += stored
            if away:
                account.away += away
            account.held = now = account.held + held
            if now > account.peak:
                account.peak = now
            self._held = now = self._held + held
            if now > self.peak:
                self.peak = now
            if booking is not None:
                booking[1] += held
                booking[2] += away

    @property
    def transient(self) -> Transient | None:
        """Return the work whose memory made the peak; None where payloads and kept tensors alone made it."""
        found = self._transient_peak
        return found if found is not None and found.peak == self.peak else None

    def touch_peak(self, account: Account | None, transient: int, work: str = "decoding") -> None:
        """Update the peaks: beside the held bytes, `transient` bytes exist on the compute device at this moment.

        They belong to `account`, or to no account. `work` names their use, as in `Transient`.
        """
        most = self._held + transient  # or less: some owners may have died since the last booking
        if most <= self.peak and most <= self.budget.limit and transient <= self._transient:
            if account is None or account.held + transient <= account.peak:
                return
            if not self.gone:
                with self._lock:
                    account.peak = max(account.peak, account.held + transient)
                return
        if not self.fits(transient):
            self.budget.make_room(transient)
        with self._lock:
            if self.gone:
                self._book_gone()
            if transient > self._transient:
                self._transient = transient
                self.reserve = max(self.reserve, transient)
            if account is not None and (now := account.held + transient) > account.peak:
                account.peak = now
            now = self._held + transient
            if now > self.peak:
                self.peak = now
                self._transient_peak = Transient(work, None if account is None else account.site, transient, now)

    @property
    def held(self) -> int:
        """Bytes that are held on the compute device now."""
        self.settle()
        return self._held

    def held_by_module(self) -> dict[str, int]:
        """Return the bytes that are held on the compute device now, by the module of their sites."""
        found: dict[str, int] = {}
        for account in self.accounts():
            if account.held:
                name = account.site.name
                found[name] = found.get(name, 0) + account.held
        return found

    def fits(self, nbytes: int) -> bool:
        """Return whether `nbytes` more can be held within the budget."""
        if self._held + nbytes <= self.budget.limit:
            return True
        with self._lock:
            self._book_gone()
            return self._held + nbytes <= self.budget.limit

    def read_compiled(self, account: Account, node: tuple[int, int], nbytes: int) -> None:
        """Add bytes that a compiled region reads in backward: it reads all that it saved before it frees any."""
        with self._lock:
            self.compiled[node] = total = self.compiled.get(node, 0) + nbytes
        self.touch_peak(account, total, "compiled")

    def occupy(self, tier: str, nbytes: int, mark: list[int]) -> None:
        """Add reserved bytes to a tier, and to a `mark` of one element; negative bytes were given back."""
        with self._lock:
            medium = self.media.setdefault(tier, [0, 0])
            medium[0] += nbytes  # an interrupt comes after a call: all lines, or none
            mark[0] += nbytes
            if medium[0] > medium[1]:
                medium[1] = medium[0]

    def time(self, account: Account, kind: str, ns: int) -> None:
        """Add the time of an "offload", a "fetch", a "stall" or a stall for "room" to an account."""
        with self._lock:
            if kind == "offload":
                account.offload_ns += ns
            elif kind == "fetch":
                account.fetch_ns += ns
            else:
                account.stall_ns += ns
                if kind == "room":
                    account.room_ns += ns

    def judge(self, account: Account, *, late: bool) -> None:
        """Count a fetch that was begun before backward asked for its payload, as late or in time."""
        with self._lock:
            if late:
                account.late += 1
            else:
                account.hits += 1

    def start(self, *, timed: bool = True) -> None:
        """Forget the figures of the last forward, but for the bytes that are still held.

        Without `timed`, no copies of this step are timed or judged: figures of copies stay as they are.
        """
        with self._lock:
            self._book_gone()
            for account in list(self._accounts.values()):
                account.saved = account.stored = account.count = account.drawn = 0
                account.peak = account.held
                if timed:
                    account.offload_ns = account.fetch_ns = account.stall_ns = account.room_ns = 0
                    account.hits = account.late = account.misses = 0
                account.alive = 0
                account.exact = False
                account.note, account.decision = FOLLOWED, None
            self.compiled.clear()
            self.reserve, self._transient = self._transient, 0
            self.peak = self._held
            self._transient_peak = None
            for medium in self.media.values():
                medium[1] = medium[0]

    def mark_turn(self) -> None:
        """Remember the held bytes, if they are the most so far, where a backward begins inside of the context."""
        with self._lock:
            self._mark_locked(turned=True)

    def mark_exit(self) -> None:
        """Remember the held bytes as those of the end of forward, unless more were held when backward began."""
        with self._lock:
            self._mark_locked(turned=False)

    def _mark_locked(self, *, turned: bool) -> None:
        self._book_gone()
        accounts = list(self._accounts.values())
        if not self._turned:
            self.turns.clear()
        if turned or self._turned:
            self.turns.append({account: account.held for account in accounts if account.held})
        if not self._turned or self._held > self.held_at_exit:
            for account in accounts:
                account.held_at_exit = account.held
            self.held_at_exit = self._held
        self._turned = turned

    def _book_gone(self) -> None:
        gone = self.gone
        while gone:
            item = gone[0]
            if not isinstance(item, Claim):
                account, held, away = item
                account.held -= held
                account.away -= away
                self._held -= held
            elif getattr(item, "memory", None) is not None:  # an interrupt may have come before it was given any
                account, held, _ = item.booking
                account.held -= held
                self._held -= held
                item.idle += [item.memory]
                item.memory = None
            gone.popleft()  # an interrupt comes after a call: all of an item is booked, or nothing
