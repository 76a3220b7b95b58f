"""The parcels of one compute device, where each of them counts, and how they end.

Python raises an interrupt (Ctrl-C) after a call in C, at the beginning of a function, or when a loop goes round. No
call stands between lines that belong together, and what an interrupt has ended can be done again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from actstore.base.ledger import Ledger
from actstore.base.ticket import Ticket
from actstore.devices import Device
from actstore.errors import ActstoreError
from actstore.tiers import Tier
from actstore.transfer.buffers import Buffer, Buffers
from actstore.transfer.order import TransferRun
from actstore.transfer.parcel import Berth, Parcel, ParcelState
from actstore.transfer.quota import Quota
from actstore.transfer.timekeeper import Timekeeper


class Parcels:
    """The parcels on their way and on the device, and the end of each. Not thread-safe.

    Attributes
    ----------
    quota : counts and bounds of the parcels that wait on the device
    open : the parcels that take more payloads
    fetching : parcels on their way back, oldest first
    ready : parcels that can be dropped from the device, the oldest first
    leaving : buffers of dropped parcels that a host thread may still use
    troubles : errors of failed writes, which the engine reports outside of the lock
    told : whether it has
    """

    def __init__(
        self, device: Device, ledger: Ledger, window_nbytes: int, times: Timekeeper, *, poison: bool = False
    ) -> None:
        self.device = device
        self.ledger = ledger
        self.times = times
        self.buffers = Buffers(device, poison=poison)
        self.quota = Quota(ledger, window_nbytes, in_turn=device.on_host)
        self.open: dict[tuple[TransferRun[Berth], Tier, Any], Parcel] = {}
        self.fetching: deque[Parcel] = deque()
        self.ready: dict[Parcel, None] = {}
        self.leaving: deque[tuple[Ticket, Buffer, list[Ticket]]] = deque()
        self.troubles: deque[ActstoreError] = deque()
        self.told = False

    def use(self, parcel: Parcel, users: int) -> None:
        """Add `users` threads or tensors that use the bytes on the device; negative to remove."""
        waited = not parcel.users
        parcel.users += users
        if waited is bool(parcel.users):
            self.quota.weigh(parcel)

    def release(self, parcel: Parcel, users: int) -> bool:
        """Remove `users`. Returns whether the parcel left the device because it has no users and no readers left."""
        parcel.users -= users
        if parcel.users:
            return False
        if parcel.state is ParcelState.DROPPED:
            self.unload(parcel)
        elif not parcel.unread and parcel in self.ready:
            self.evict(parcel)
            return True
        elif users:
            self.quota.weigh(parcel)
        return False

    def turn_ready(self, parcel: Parcel) -> None:
        parcel.turn(ParcelState.READY)
        self.quota.weigh(parcel)
        self.ready[parcel] = None

    def evict(self, parcel: Parcel) -> None:
        """Drop the bytes on the device, which the tier has too."""
        self.ready.pop(parcel, None)
        self.book(parcel, here=False)
        parcel.turn(ParcelState.RESIDENT)
        self.quota.weigh(parcel)
        self.unload(parcel)

    def give_up(self, parcel: Parcel) -> None:
        """Handle a failed fetch, so that the next `arrive` tries again."""
        if parcel.state is ParcelState.FETCHING:
            self.book(parcel, here=False)
            parcel.turn(ParcelState.RESIDENT)
            self.quota.weigh(parcel)
            self.unload(parcel)

    def forget(self, berth: Berth) -> None:
        """Drop a payload, whose last reader died. Repeatable: what an interrupt ends is done the next time."""
        parcel = berth.parcel
        if berth in parcel.berths:
            parcel.unread.discard(berth)
            parcel.run.forget(berth.serial)
            if not parcel.run.berths:
                self.quota.runs.discard(parcel.run)
            gone = self.ledger.gone
            gone += (berth.booking,)  # an interrupt comes after a call: both lines, or neither
            parcel.berths -= {berth}
        self.drop_empty(parcel)

    def drop_empty(self, parcel: Parcel) -> None:
        """Drop a parcel if it has no payloads. Repeatable."""
        if parcel.berths:
            return
        state = parcel.state
        if state is ParcelState.OPEN:
            key = parcel.run, parcel.tier, parcel.home
            if self.open.get(key) is parcel:
                del self.open[key]
            parcel.reads.add(parcel.home)
        elif state is ParcelState.OFFLOADING:
            self.quota.leave(parcel)
        else:
            self.ready.pop(parcel, None)
        if state is not ParcelState.DROPPED:
            parcel.turn(ParcelState.DROPPED)
        self.quota.weigh(parcel)
        self.free_slot(parcel)
        if not parcel.users:
            self.unload(parcel)

    def free_slot(self, parcel: Parcel) -> None:
        slot = parcel.slot
        if slot is not None:
            slot.tier.free(slot)
            self.ledger.occupy(parcel.tier.name, -parcel.occupied[0], parcel.occupied)
            parcel.slot = None

    def unload(self, parcel: Parcel) -> None:
        """Free the buffer of a parcel."""
        buffer = parcel.buffer
        if buffer is None:
            return
        motion = parcel.motion
        # A host thread skips a copy whose slot was freed before it began: `motion` has then not awaited `before`.
        before = buffer.after if parcel.fetched else (parcel.arrival,)
        reads = map(self.device.record, parcel.reads)
        after = [ticket for ticket in (*before, *reads) if ticket is not None and not ticket.ready()]
        if motion is None or motion.ready():
            self.buffers.give(buffer, after, parcel)  # 6
        elif motion.on_stream:
            self.buffers.give(buffer, [motion, *after], parcel)
        else:
            self.leaving += ((motion, buffer, after),)
            parcel.buffer = None
        parcel.reads = set()
        self.buffers.shrink()

    def book(self, parcel: Parcel, *, here: bool) -> None:
        """Record where payloads are: on the device, or elsewhere. In both places, they count as on the device."""
        for berth in parcel.berths:
            account, held, away = berth.booking
            held = berth.nbytes * here + parcel.held_nbytes(berth) - held
            away = berth.nbytes * (not here) - away
            self.ledger.add(account, 0, 0, held, away, has_room=True, booking=berth.booking)
