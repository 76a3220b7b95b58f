"""The parcels of one compute device, and the effect of each state change on memory, windows and books.

Python raises an interrupt (Ctrl-C) after a call in C, at the beginning of a function, or when a loop goes round. No
call stands between lines that belong together, and what an interrupt has ended can be done again.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from actstore.base.ledger import Account, Ledger
from actstore.base.ticket import DONE, Ticket
from actstore.base.units import round_up
from actstore.devices import Device
from actstore.errors import ActstoreError, ReplicaError, StateError, TransferError
from actstore.tiers import Tier
from actstore.transfer.buffers import Buffer, Buffers
from actstore.transfer.order import TransferRun
from actstore.transfer.parcel import Berth, Carrier, Loan, Parcel, ParcelState, lend
from actstore.transfer.timekeeper import Timekeeper
from actstore.transfer.window import FlightWindow, Quota

GRAIN_NBYTES = 4096  # buffer sizes are multiples of it, so that a disk writes them without a copy


class Traffic:
    """The parcels of one compute device: in motion, on the device, and their ends. Not thread-safe: the engine calls
    it under its lock.

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

    def load(self, run: TransferRun[Berth], tier: Tier, stream: Any, capacity: int, account: Account) -> Parcel | None:
        """Return an empty parcel with room in `tier`, or None when the tier is full."""
        slot = tier.reserve(capacity)
        if slot is None:
            return None
        slot.tier, parcel = tier, None
        try:
            self.drop_unwanted(partial(self.quota.has_room, run, capacity))
            buffer = self.buffers.take(capacity)  # an interrupt may lose it: what it counts for goes with it
            for ticket in buffer.after:  # 1
                stall = self.device.wait(stream, ticket)
                if stall is not None:
                    self.times.expect("stall", stall, tier.name, [(account, capacity)], for_room=True)
            parcel = Parcel(buffer, slot, stream, run)
            self.ledger.occupy(tier.name, capacity, parcel.occupied)
            self.quota.weigh(parcel)
        except BaseException:
            if parcel is None:
                tier.free(slot)
            else:
                self.drop_empty(parcel)
            raise
        return parcel

    def assign(self, engine: Carrier, parcel: Parcel, size: int, nbytes: int, account: Account) -> Berth:
        run = parcel.run
        serial = run.number(id(account), nbytes)
        berth = Berth(engine, parcel, parcel.used, nbytes, account, serial)
        parcel.used += size
        parcel.filling += 1
        try:
            parcel.berths.add(berth)
            parcel.unread.add(berth)
            run.berths[berth.serial] = berth
            if serial == 0:
                self.quota.begin(run)
            held = nbytes + parcel.held_nbytes(berth)
            self.ledger.add(account, 0, 0, held, has_room=True, booking=berth.booking)
        except BaseException:  # an interrupt
            parcel.filling -= 1
            self.forget(berth)
            raise
        return berth

    def seal(self, parcel: Parcel) -> None:
        """Close a parcel to more payloads, and dispatch it once all are encoded."""
        del self.open[parcel.run, parcel.tier, parcel.home]
        parcel.closed = True  # an interrupt comes after a call: both lines, or neither
        if not parcel.filling:
            self.dispatch(parcel)

    def dispatch(self, parcel: Parcel) -> None:
        slot, buffer = parcel.slot, parcel.buffer
        assert slot is not None
        assert buffer is not None
        if not parcel.tier.alone:
            parcel.used = round_up(parcel.used, GRAIN_NBYTES)
        parcel.arrival = self.device.record(parcel.home)
        parcel.turn(ParcelState.OFFLOADING)
        try:
            self.quota.window(parcel.tier).flights.append(parcel)
            parcel.motion = parcel.tier.write(slot, buffer.memory[: parcel.used], (parcel.arrival,))  # 2
        except BaseException as error:
            parcel.motion = DONE
            if not isinstance(error, ActstoreError | RuntimeError | OSError):
                self.strand(parcel, None)
                raise
            self.strand(parcel, error if isinstance(error, ActstoreError) else TransferError(str(error)))
            return
        if self.device.timing:
            self.times.expect("offload", parcel.motion, parcel.tier.name, parcel.shares())

    def land(self, parcel: Parcel) -> None:
        """Complete a copy out. The bytes have left the buffer, or the compute stream waits until they have."""
        motion = parcel.motion
        assert motion is not None
        if parcel.state is not ParcelState.OFFLOADING:  # an interrupt fell between its turn and the end of its flight
            self.quota.leave(parcel)
            return
        if motion.ready():
            try:
                motion.result()
            except ActstoreError as error:
                self.strand(parcel, error)
                return
        stays = parcel.users or self.stays(parcel)
        self.turn_ready(parcel)
        self.quota.leave(parcel)
        if not stays:
            self.evict(parcel)

    def stays(self, parcel: Parcel) -> bool:
        """Return whether a parcel that has left stays on the device too, because backward is about to ask for it.

        In backward it always stays: it takes up no more memory than on its way, and a fetch would cost time.
        """
        soon = any(berth.serial in parcel.run.soon for berth in parcel.unread)
        return parcel.wanted() or (soon and self.quota.may_stay(parcel))

    def strand(self, parcel: Parcel, error: ActstoreError | None) -> None:
        """Keep on the device a parcel that its tier has lost. `error` is None after an interrupt."""
        self.quota.leave(parcel)
        self.free_slot(parcel)
        self.book(parcel, here=True)
        parcel.turn(ParcelState.READY)
        self.quota.weigh(parcel)
        parcel.note_failure(error)
        if error is not None and not isinstance(error, StateError):  # the tier was closed, or this is a fork
            self.troubles.append(error)

    def fetch(self, parcel: Parcel) -> None:
        slot = parcel.slot
        assert slot is not None
        buffer = self.buffers.take(parcel.capacity)
        try:
            motion = parcel.tier.read(slot, buffer.memory[: parcel.used], buffer.after)  # 4
        except BaseException:
            self.buffers.forget(buffer)
            raise
        unread = set(parcel.berths)
        parcel.turn(ParcelState.FETCHING)
        parcel.buffer, parcel.motion, parcel.arrival, parcel.fetched = buffer, motion, motion, True
        parcel.unread, parcel.reads = unread, set()
        for berth in parcel.berths:
            berth.reads = 0
        self.quota.weigh(parcel)
        self.fetching.append(parcel)
        self.book(parcel, here=True)
        if self.device.timing:
            self.times.expect("fetch", motion, parcel.tier.name, parcel.shares())

    def lendable(self, berth: Berth) -> bool:
        parcel = berth.parcel
        return (
            self.device.on_host
            and parcel.alone
            and berth.nbytes > 0
            and parcel.slot is not None
            and parcel.state not in (ParcelState.OPEN, ParcelState.OFFLOADING)
        )

    def lend(
        self, berth: Berth, dtype: torch.dtype, returned: Callable[[Loan], None], *, for_good: bool = False
    ) -> torch.Tensor:
        """Make the buffer of a payload the memory of a tensor; `for_good` gives the buffer up at once."""
        parcel = berth.parcel
        loan = parcel.loan
        tensor = None if loan is None else loan.again()
        if loan is None or tensor is None:
            assert parcel.buffer is not None
            loan, tensor = lend(parcel, parcel.buffer.memory[: berth.nbytes], dtype, returned)
            parcel.loan = loan
        loan.users += 1
        berth.count_read()
        if for_good:
            self.renounce(loan)
        return tensor

    def take_back(self, loan: Loan) -> None:
        parcel = loan.parcel
        if parcel is None:
            return
        if parcel.loan is loan:
            if loan.is_changed() and not parcel.gone():
                self.renounce(loan)
                return
            parcel.loan = None
        loan.parcel = None  # no call follows until the users are gone, too: an interrupt would make them go twice
        parcel.users -= loan.users
        self.quota.weigh(parcel)
        self.release(parcel, 0)

    def renounce(self, loan: Loan) -> None:
        """Give up a loan whose bytes a write has changed. The tier still has the payload."""
        parcel = loan.parcel
        assert parcel is not None
        assert parcel.buffer is not None
        loan.parcel = parcel.loan = None
        self.use(parcel, -loan.users)
        self.buffers.forget(parcel.buffer)
        parcel.buffer = None
        self.evict(parcel)

    def count_in_time(self, account: Account) -> None:
        """Count bytes that were on the device before backward asked for them."""
        if self.device.timing:  # else one that is late is not noticed either
            self.ledger.judge(account, late=False)
            self.quota.lookahead.in_time()

    def look_ahead(self, run: TransferRun[Berth]) -> None:
        """Fetch the payloads that backward is expected to read next, within the bounds."""
        while (berth := run.upcoming()) is not None:
            parcel = berth.parcel
            if parcel.state is ParcelState.RESIDENT:
                if not self.drop_unwanted(partial(self.quota.admits, run, parcel.capacity)):
                    return
                if not self.ledger.fits(parcel.used + self.ledger.reserve):
                    return
                try:
                    self.fetch(parcel)
                except (torch.OutOfMemoryError, MemoryError):
                    self.quota.lookahead.limit_nbytes //= 2
                    run.passed()  # `arrive` fetches it later
                    return
            run.passed()

    def drop_unwanted(self, enough: Callable[[], bool]) -> bool:
        """Drop parcels that tiers have and backward is not about to read, until `enough`. Returns whether it is."""
        if enough():
            return True
        for parcel in list(self.ready):
            if not parcel.users and not parcel.wanted():
                self.evict(parcel)
                if enough():
                    return True
        return False

    def shed(self, nbytes: int) -> bool:
        """Drop parcels that tiers have too and no thread reads, until `nbytes` fit within the limit of what is held.

        Parcels that backward is not expected to ask for go first, then those fetched last.
        """
        if self.ledger.fits(nbytes):
            return True
        early = [parcel for parcel in (*self.fetching, *reversed(self.ready)) if self._is_spare(parcel)]
        for parcel in sorted(early, key=Parcel.wanted):
            if self.ledger.fits(nbytes):
                break
            if parcel.state is ParcelState.READY:
                self.evict(parcel)
            else:
                self.give_up(parcel)
        return self.ledger.fits(nbytes)

    def _is_spare(self, parcel: Parcel) -> bool:
        """Return whether a parcel that was fetched, or has left, can be dropped from the device."""
        idle = not parcel.users and not any(berth.reads for berth in parcel.unread)
        return idle and (parcel in self.ready or parcel.state is ParcelState.FETCHING)

    def oldest(self, windows: Collection[FlightWindow]) -> Parcel | None:
        """Return a parcel that is on its way out, the oldest of its tier. If none is, send the open parcels first."""
        if not any(window.flights for window in windows):
            for parcel in list(self.open.values()):
                if self.quota.window(parcel.tier) in windows:
                    self.seal(parcel)
        return next((window.flights[0] for window in windows if window.flights), None)

    def tidy(self) -> None:
        """Process the copies that have ended since the last call."""
        for window in self.quota.windows.values():
            while window.flights and (motion := window.flights[0].motion) is not None and motion.ready():
                self.land(window.flights[0])
        while self.fetching:
            parcel = self.fetching[0]
            if parcel.state is ParcelState.FETCHING and parcel.motion is not None:
                if not parcel.motion.ready():
                    break
                if not parcel.users:
                    try:
                        parcel.motion.result()
                    except ActstoreError:
                        self.give_up(parcel)  # `arrive` raises the error
                    else:
                        self.turn_ready(parcel)
            self.fetching.popleft()
        while self.leaving and self.leaving[0][0].ready():
            _, buffer, after = self.leaving[0]
            self.buffers.give(buffer, after)
            self.leaving.popleft()
            self.buffers.shrink()
        for late, nbytes in self.times.settle():
            if late:
                self.quota.lookahead.late(nbytes)
            else:
                self.quota.lookahead.in_time()

    # -- users and ends -----------------------------------------------------------------------------------------------

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

    def tell(self) -> None:
        """Warn about failed writes, and raise a ReplicaError. The engine calls it without its lock, because of that."""
        while self.troubles:
            error = self.troubles.popleft()
            if isinstance(error, ReplicaError):
                raise error
            if not self.told:
                self.told = True
                warnings.warn(
                    f"activations could not leave the device: {str(error).rstrip('.')}. They stay there, and gradients "
                    "are right, but memory is not saved. Leave the tier out, or give Disk(path) a disk that works.",
                    RuntimeWarning,
                    stacklevel=2,
                )
