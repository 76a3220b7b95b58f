"""The parcels of one compute device, and the effect of each state change on memory, windows and books."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from actstore.base.ledger import Account, Ledger
from actstore.base.ticket import DONE, Ticket
from actstore.base.units import round_up
from actstore.devices import Device
from actstore.errors import ActstoreError, StateError, TransferError
from actstore.tiers import Tier
from actstore.transfer.buffers import Buffer, Buffers
from actstore.transfer.loan import Loan, lend
from actstore.transfer.order import TransferRun
from actstore.transfer.parcel import Berth, Carrier, Parcel, ParcelState
from actstore.transfer.quota import Quota
from actstore.transfer.timekeeper import Timekeeper
from actstore.transfer.window import FlightWindow

GRAIN_NBYTES = 4096  # buffer sizes are multiples of it, so that a disk writes them without a copy


class Traffic:
    """The parcels on their way and on the device. Not thread-safe: the engine calls it under its lock.

    Attributes
    ----------
    quota : counts and bounds of the parcels that wait on the device
    open : the parcels that take more payloads
    fetching : parcels on their way back, oldest first
    ready : parcels that can be dropped from the device, the oldest first
    leaving : buffers of dropped parcels that a host thread may still use
    troubles : errors of failed writes, which the engine reports outside of the lock
    """

    def __init__(
        self, device: Device, ledger: Ledger, window_nbytes: int, times: Timekeeper, *, poison: bool = False
    ) -> None:
        self.device = device
        self.ledger = ledger
        self.times = times
        self.buffers = Buffers(device, poison=poison)
        self.quota = Quota(ledger, window_nbytes)
        self.open: dict[tuple[TransferRun[Berth], Tier, Any], Parcel] = {}
        self.fetching: deque[Parcel] = deque()
        self.ready: dict[Parcel, None] = {}
        self.leaving: deque[tuple[Ticket, Buffer, list[Ticket]]] = deque()
        self.troubles: deque[ActstoreError] = deque()

    def load(self, run: TransferRun[Berth], tier: Tier, stream: Any, capacity: int, account: Account) -> Parcel | None:
        """Return an empty parcel with room in `tier`, or None when the tier is full."""
        slot = tier.reserve(capacity)
        if slot is None:
            return None
        slot.tier = tier
        try:
            self.drop_unwanted(partial(self.quota.has_room, run, capacity))
            buffer = self.buffers.take(capacity)
        except BaseException:
            tier.free(slot)
            raise
        for ticket in buffer.after:  # 1
            stall = self.device.wait(stream, ticket)
            if stall is not None:
                self.times.expect("stall", stall, tier.name, [(account, capacity)], for_room=True)
        self.quota.window(tier).nbytes += capacity
        self.ledger.occupy(tier.name, capacity)
        parcel = Parcel(buffer, slot, stream, run)
        self.quota.weigh(parcel)
        return parcel

    def assign(self, engine: Carrier, parcel: Parcel, size: int, nbytes: int, account: Account) -> Berth:
        run = parcel.run
        serial = run.number(id(account), nbytes)
        if serial == 0:
            self.quota.begin(run)
        berth = Berth(engine, parcel, parcel.used, nbytes, account, serial)
        parcel.used += size
        parcel.filling += 1
        parcel.berths.add(berth)
        parcel.unread.add(berth)
        run.berths[berth.serial] = berth
        self.ledger.add(account, 0, 0, nbytes + parcel.held_nbytes(berth), has_room=True)
        return berth

    def seal(self, parcel: Parcel) -> None:
        """Close a parcel to more payloads, and dispatch it once all are encoded."""
        del self.open[parcel.run, parcel.tier, parcel.home]
        parcel.closed = True
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
        self.quota.window(parcel.tier).flights.append(parcel)
        try:
            parcel.motion = parcel.tier.write(slot, buffer.memory[: parcel.used], (parcel.arrival,))  # 2
        except BaseException as error:
            parcel.motion = DONE
            if not isinstance(error, ActstoreError | RuntimeError | OSError):
                self.strand(parcel, None)
                raise
            self.strand(parcel, error if isinstance(error, ActstoreError) else TransferError(str(error)))
            return
        self.times.expect("offload", parcel.motion, parcel.tier.name, parcel.shares())

    def land(self, parcel: Parcel) -> None:
        """Complete a copy out. The bytes have left the buffer, or the compute stream waits until they have."""
        motion = parcel.motion
        assert motion is not None
        if motion.ready():
            try:
                motion.result()
            except ActstoreError as error:
                self.strand(parcel, error)
                return
        stays = parcel.users or self.stays(parcel)
        self.quota.leave(parcel)
        self.turn_ready(parcel)
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
        for berth in parcel.berths:
            self.ledger.release([berth.account, parcel.held_nbytes(berth), 0])
        self.free_slot(parcel)
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
        parcel.turn(ParcelState.FETCHING)
        parcel.buffer, parcel.motion, parcel.arrival, parcel.fetched = buffer, motion, motion, True
        parcel.unread = set(parcel.berths)
        for berth in parcel.berths:
            berth.reads = 0
        self.quota.weigh(parcel)
        self.fetching.append(parcel)
        self.book_held(parcel, 1)
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

    def lend(self, berth: Berth, dtype: torch.dtype, returned: Callable[[Loan[Parcel]], None]) -> torch.Tensor:
        parcel = berth.parcel
        loan = parcel.loan
        tensor = None if loan is None else loan.again()
        if loan is None or tensor is None:
            assert parcel.buffer is not None
            loan, tensor = lend(parcel, parcel.buffer.memory[: berth.nbytes], dtype, returned)
            parcel.loan = loan
        loan.users += 1
        berth.count_read()
        return tensor

    def take_back(self, loan: Loan[Parcel]) -> None:
        parcel = loan.parcel
        if parcel is None:
            return
        if parcel.loan is loan:
            if loan.is_changed() and not parcel.gone():
                self.renounce(loan)
                return
            parcel.loan = None
        self.release(parcel, loan.users)

    def renounce(self, loan: Loan[Parcel]) -> None:
        """Give up a loan whose bytes a write has changed. The tier still has the payload."""
        parcel = loan.parcel
        assert parcel is not None
        assert parcel.buffer is not None
        loan.parcel = parcel.loan = None
        self.use(parcel, -loan.users)
        self.buffers.forget(parcel.buffer)
        parcel.buffer = None
        self.evict(parcel)

    def use(self, parcel: Parcel, users: int) -> None:
        """Add `users` threads or tensors that use the bytes on the device; negative to remove."""
        waited = not parcel.users
        parcel.users += users
        if waited is bool(parcel.users):
            self.quota.weigh(parcel)

    def release(self, parcel: Parcel, users: int) -> bool:
        """Remove `users`. Returns whether the parcel left the device because it has no users and no readers left."""
        self.use(parcel, -users)
        if parcel.users:
            return False
        if parcel.gone():
            self.unload(parcel)
        elif parcel in self.ready and not parcel.unread:
            self.evict(parcel)
            return True
        return False

    def turn_ready(self, parcel: Parcel) -> None:
        parcel.turn(ParcelState.READY)
        self.quota.weigh(parcel)
        self.ready[parcel] = None

    def evict(self, parcel: Parcel) -> None:
        """Drop the bytes on the device, which the tier has too."""
        del self.ready[parcel]
        self.book_held(parcel, -1)
        parcel.turn(ParcelState.RESIDENT)
        self.quota.weigh(parcel)
        self.unload(parcel)

    def give_up(self, parcel: Parcel) -> None:
        """Handle a failed fetch, so that the next `arrive` tries again."""
        if parcel.state is ParcelState.FETCHING:
            self.book_held(parcel, -1)
            parcel.turn(ParcelState.RESIDENT)
            self.quota.weigh(parcel)
            self.unload(parcel)

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

    def forget(self, berth: Berth) -> None:
        """Drop a payload, whose last reader died."""
        parcel = berth.parcel
        if berth not in parcel.berths:
            return
        parcel.berths.discard(berth)
        parcel.unread.discard(berth)
        parcel.run.forget(berth.serial)
        if not parcel.run.berths:
            self.quota.runs.discard(parcel.run)
        on_device = parcel.buffer is not None
        held = berth.nbytes * on_device + parcel.held_nbytes(berth)
        self.ledger.release([berth.account, held, berth.nbytes * (not on_device)])
        if parcel.berths:
            return
        state = parcel.state
        if state is ParcelState.OPEN:
            if not parcel.closed:
                del self.open[parcel.run, parcel.tier, parcel.home]
            parcel.reads.append(self.device.record(parcel.home))
            self.quota.window(parcel.tier).nbytes -= parcel.capacity
        elif state is ParcelState.OFFLOADING:
            self.quota.leave(parcel)
        else:
            self.ready.pop(parcel, None)
        parcel.turn(ParcelState.DROPPED)
        self.quota.weigh(parcel)
        self.free_slot(parcel)
        if not parcel.users:
            self.unload(parcel)

    def free_slot(self, parcel: Parcel) -> None:
        slot, parcel.slot = parcel.slot, None
        if slot is not None:
            slot.tier.free(slot)
            self.ledger.occupy(parcel.tier.name, -slot.nbytes)

    def unload(self, parcel: Parcel) -> None:
        """Free the buffer of a parcel."""
        buffer, parcel.buffer = parcel.buffer, None
        if buffer is None:
            return
        motion = parcel.motion
        # A host thread skips a copy whose slot was freed before it began: `motion` has then not awaited `before`.
        before = buffer.after if parcel.fetched else (parcel.arrival,)
        after = [ticket for ticket in (*before, *parcel.reads) if ticket is not None and not ticket.ready()]
        parcel.reads = []
        if motion is None or motion.ready():
            self.buffers.give(buffer, after)  # 6
        elif motion.on_stream:
            self.buffers.give(buffer, [motion, *after])
        else:
            self.leaving.append((motion, buffer, after))

    def book_held(self, parcel: Parcel, sign: int) -> None:
        """Record payloads as come to the device (1), or gone from it (-1). In both places, they count as there."""
        for berth in parcel.berths:
            self.ledger.add(berth.account, 0, 0, sign * berth.nbytes, -sign * berth.nbytes, has_room=True)

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
            _, buffer, after = self.leaving.popleft()
            self.buffers.give(buffer, after)
        for late, nbytes in self.times.settle():
            if late:
                self.quota.lookahead.late(nbytes)
            else:
                self.quota.lookahead.in_time()
