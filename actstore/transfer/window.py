"""Bounds on payloads that wait on the device although a tier has them, or is about to have them."""

from __future__ import annotations

from collections import deque
from math import inf

from actstore.base.ledger import Ledger
from actstore.tiers import Tier
from actstore.transfer.order import TransferRun
from actstore.transfer.parcel import Berth, Parcel, ParcelState

BOUND_DIVISOR = 3  # a third of the bytes that forwards move may wait on the device
BURST_DIVISOR = 8  # an eighth may come back early, beyond the window, where the link was idle
MIN_BOUND_NBYTES = 4 * 2**20  # less frees little memory, and its many small copies cost time

_AWAY = ParcelState.RESIDENT, ParcelState.DROPPED
_LEAVING = ParcelState.OPEN, ParcelState.OFFLOADING
_BACK = ParcelState.FETCHING, ParcelState.READY


class FlightWindow:
    """The parcels that leave the device for one tier, oldest first. Not thread-safe.

    Bytes count from just before the first payload is encoded until the copy has left the buffer. With several threads
    the limit can be exceeded by one parcel for each other thread that encodes at the same time.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.flights: deque[Parcel] = deque()

    def admits(self, nbytes: int, limit_nbytes: int) -> bool:
        """Return whether `nbytes` more may begin to leave. A request above the limit begins when no bytes leave."""
        return not self.nbytes or self.nbytes + nbytes <= limit_nbytes


class Lookahead:
    """The bound on bytes that come back before backward asks for them. It grows when one is late, else shrinks.

    Not thread-safe.
    """

    PATIENCE = 256  # payloads in time before the bound shrinks
    limit_nbytes = 0

    def __init__(self, most_nbytes: int) -> None:
        self.resize(most_nbytes)
        self.limit_nbytes = self._least_nbytes  # memory is taken only where a late fetch proves the need
        self.nbytes = 0  # bytes on their way, or waiting for backward
        self._in_time = 0

    def resize(self, most_nbytes: int) -> None:
        """Set the maximum that the bound can grow to."""
        self._most_nbytes = most_nbytes
        self._least_nbytes = max(1, most_nbytes // 16)
        self.limit_nbytes = min(self.limit_nbytes, most_nbytes)

    def admits(self, nbytes: int) -> bool:
        return not self.nbytes or self.nbytes + nbytes <= self.limit_nbytes

    def widen(self) -> None:
        """Grow the bound to its maximum, as many late payloads do."""
        self.limit_nbytes = self._most_nbytes

    def late(self, nbytes: int) -> None:
        """Grow the bound after a late payload of `nbytes`, so that at least two of its size fit."""
        self._in_time = 0
        self.limit_nbytes = min(self._most_nbytes, 2 * max(self.limit_nbytes, nbytes))

    def in_time(self) -> None:
        self._in_time += 1
        if self._in_time == self.PATIENCE:
            self._in_time = 0
            self.limit_nbytes = max(self._least_nbytes, self.limit_nbytes * 7 // 8)


class Quota:
    """Counts and bounds of the parcels on the device that a tier has or is about to have. Not thread-safe.

    They are on their way out, stay for backward, or were fetched ahead. One that a thread reads does not count.

    Parameters
    ----------
    in_turn : whether bytes that leave make those that come back wait: a CPU's link is a disk, which shares its rate
        between both directions. Another device's link can be busy in both

    Attributes
    ----------
    windows : by tier, the parcels that leave for it
    lookahead : bound on the bytes that stay for backward, or come back, before backward asks for them
    back_nbytes : maximum of that bound
    runs : runs with live payloads
    nbytes : size of the parcels that wait
    """

    def __init__(self, ledger: Ledger, window_nbytes: int, *, in_turn: bool) -> None:
        self._ledger = ledger
        self._in_turn = in_turn
        self.window_nbytes = self.back_nbytes = window_nbytes
        self.windows: dict[Tier, FlightWindow] = {}
        self.lookahead = Lookahead(window_nbytes)
        self.runs: set[TransferRun[Berth]] = set()
        self.nbytes = 0

    def resize(self, window_nbytes: int) -> None:
        """Set the bound on bytes that leave for one tier at once, and on bytes that come back early."""
        self.window_nbytes = window_nbytes
        self.widen(window_nbytes)

    def widen(self, back_nbytes: int) -> None:
        """Set the bound on bytes that come back early, alone."""
        self.back_nbytes = back_nbytes
        self.lookahead.resize(back_nbytes)

    def window(self, tier: Tier) -> FlightWindow:
        """Return the window of a tier."""
        window = self.windows.get(tier)
        if window is None:
            window = self.windows[tier] = FlightWindow()
        return window

    def limit_nbytes(self, run: TransferRun[Berth], *, back: bool = False) -> int:
        """Return the bound: the window, or a third of what `run` and the other runs move, as far as that is known.

        Under a budget of all that is held it is the window, because the budget bounds the sum. `back` bounds the bytes
        that come back early.
        """
        if self._ledger.budget.limit < inf:
            return self.window_nbytes
        others = sum(other.moved_nbytes for other in self.runs if other.berths and other is not run)
        moved = run.moved_nbytes + others
        window = max(self.window_nbytes, min(self.back_nbytes, moved / BURST_DIVISOR)) if back else self.window_nbytes
        return int(min(window, max(MIN_BOUND_NBYTES, moved / BOUND_DIVISOR)))

    def may_leave(self, run: TransferRun[Berth], tier: Tier, nbytes: int) -> bool:
        """Return whether `nbytes` of `run` may begin to leave for `tier`, beside the bytes that leave and that stay."""
        return self.window(tier).admits(nbytes, self.limit_nbytes(run) - run.ahead_nbytes)

    def leave(self, parcel: Parcel) -> None:
        """Note that a parcel is no longer on its way to its tier."""
        flights = self.window(parcel.tier).flights
        if parcel in flights:  # unless an interrupt (Ctrl-C) came between its turn and its departure
            flights.remove(parcel)

    def admits(self, run: TransferRun[Berth], nbytes: int) -> bool:
        """Return whether `nbytes` may come back before backward asks for them. One payload always may, in its turn."""
        waiting = self.lookahead.nbytes
        if self._in_turn:
            waiting += sum(window.nbytes for window in self.windows.values())
        return self.lookahead.admits(nbytes) and (not waiting or waiting + nbytes <= self.limit_nbytes(run, back=True))

    def begin(self, run: TransferRun[Berth]) -> None:
        """Count `run` from its first payload on, and let at most half of its bound stay for backward."""
        self.runs.add(run)
        run.keep_soon(min(self.lookahead.limit_nbytes, self.limit_nbytes(run) // 2))

    def may_stay(self, parcel: Parcel) -> bool:
        """Return whether a parcel that has just left may also stay for backward. The quota counts it as leaving."""
        fits = self.nbytes <= max(parcel.capacity, self.limit_nbytes(parcel.run))
        return fits and self.lookahead.admits(parcel.capacity)

    def has_room(self, run: TransferRun[Berth], nbytes: int) -> bool:
        """Return whether `nbytes` more may wait within the bound."""
        return self.nbytes + nbytes <= self.limit_nbytes(run)

    def weigh(self, parcel: Parcel) -> None:
        """Count a parcel anew after a change of its state or its users.

        An interrupt comes after a call: all is counted, or nothing, and then the next time.
        """
        window = self.windows.get(parcel.tier) or self.window(parcel.tier)
        state, nbytes = parcel.state, parcel.capacity
        waits = 0 if state in _AWAY or parcel.slot is None or parcel.users else nbytes
        leaves = nbytes if state in _LEAVING else 0
        ahead = waits if state in _BACK else 0
        self.nbytes += waits - parcel.waiting_nbytes
        self.lookahead.nbytes += ahead - parcel.ahead_nbytes
        parcel.run.ahead_nbytes += ahead - parcel.ahead_nbytes
        window.nbytes += leaves - parcel.leaving_nbytes
        parcel.waiting_nbytes, parcel.ahead_nbytes, parcel.leaving_nbytes = waits, ahead, leaves
