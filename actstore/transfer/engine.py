"""Moves payloads between the compute device and the tiers, each once, in time, and within bounds.

Order of the operations on the memory of one parcel; the numbers stand at the code below:

1. the compute stream encodes the payloads into the buffer, after the buffer's last uses;
2. the tier copies the buffer out, after 1; the host goes on;
3. the buffer is used again after 2: by a stream that waits for it, or once the host has seen its end;
4. the tier copies the payload back into a buffer, after 2 and after that buffer's last uses;
5. the compute stream decodes, after 4 (or after 1, while the bytes are still there);
6. the buffer is used again after 5.

No user's tensor is touched on any other stream than the one that was current when autograd packed or unpacked it.
"""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import suppress
from threading import Lock
from typing import Any

import torch

from actstore.devices import Device
from actstore.errors import ActstoreError, StateError, TransferError
from actstore.ledger import Account, Ledger
from actstore.reaper import Reaper
from actstore.ticket import DONE, Ticket
from actstore.tiers import Tier
from actstore.trace import Kind, Trace
from actstore.transfer.buffers import Buffer, Buffers
from actstore.transfer.loan import Loan, lend
from actstore.transfer.order import Lessons, Run
from actstore.transfer.parcel import Berth, Parcel, State
from actstore.transfer.timekeeper import Timekeeper
from actstore.transfer.window import Lookahead, Window
from actstore.units import round_up

DEVICE_WINDOW_NBYTES = 256 * 2**20  # copies on a stream: about 5 ms of a 55 GB/s link
HOST_WINDOW_NBYTES = 32 * 2**20  # writes of host threads: four of a chunk each

SMALL_NBYTES = 2**20  # smaller payloads travel together
PARCEL_NBYTES = 4 * 2**20
GRAIN = 4096  # buffers are multiples of it, which a disk can write without a copy
BERTH = 64  # payloads begin at multiples of it


class Engine:
    """The traffic of one compute device. Thread-safe; `drop` is safe in finalizers.

    Parameters
    ----------
    device : where payloads are made
    ledger : where bytes are booked as they move
    window_nbytes : most bytes that leave for one tier at once, and that are fetched ahead; None for a default
    trace : where each copy and each stall is written down, if anywhere
    poison : see Buffers
    """

    def __init__(
        self,
        device: Device,
        ledger: Ledger,
        window_nbytes: int | None = None,
        trace: Trace | None = None,
        *,
        poison: bool = False,
    ) -> None:
        if window_nbytes is None:
            window_nbytes = HOST_WINDOW_NBYTES if device.on_host else DEVICE_WINDOW_NBYTES
        self._device = device
        self._ledger = ledger
        self._window_nbytes = window_nbytes
        self._lock = Lock()
        self._dropped = Reaper[Berth](self._lock, self._forget)
        self.put_dropped = self._dropped.put  # `drop` in one call of a C function
        self._returned = Reaper[Loan](self._lock, self._take_back)
        self._buffers = Buffers(device, poison=poison)
        self._windows: dict[Tier, Window] = {}
        self._lookahead = Lookahead(window_nbytes)
        self._lessons = Lessons()
        self._times = Timekeeper(ledger, trace)
        self._open: dict[tuple[Run, Tier, Any], Parcel] = {}  # those that take more payloads
        self._fetching: deque[Parcel] = deque()
        self._ready: dict[Parcel, None] = {}  # those on the device that can be dropped there, longest first
        self._leaving: deque[tuple[Ticket, Buffer, list[Ticket]]] = deque()  # of dropped parcels, with host threads
        self._troubles: deque[ActstoreError] = deque()  # writes that failed, to be told outside of the lock
        self._told = False
        self._closed = False

    # -- forward ------------------------------------------------------------------------------------------------------

    def begin(self) -> Run:
        """A new forward pass."""
        return Run(self._lessons)

    def admits(self, tier: Tier, nbytes: int) -> bool:
        """Whether a payload could leave for `tier` now without waiting for others."""
        with self._lock:
            self._tidy()
            return self._window(tier).admits(round_up(nbytes, GRAIN))

    def board(self, run: Run, tier: Tier, nbytes: int, account: Account) -> Berth | None:
        """Room for one payload on the device, and in `tier`; None when the tier is full.

        When the window is full, the compute stream waits for the oldest copy; the host waits only where a host thread
        is the one that copies. Call `depart` once the payload's encoding is queued, or `cancel`.
        """
        stream = self._device.current()
        size = round_up(max(nbytes, 1), BERTH)
        small = size < SMALL_NBYTES
        capacity = PARCEL_NBYTES if small else round_up(size, GRAIN)
        while True:
            with self._lock:
                self._tidy()
                parcel = self._open.get((run, tier, stream)) if small else None
                if parcel is not None:
                    if parcel.used + size <= parcel.capacity:
                        return self._assign(parcel, size, nbytes, account)
                    self._close(parcel)
                window = self._window(tier)
                if not window.admits(capacity) and not window.flights:
                    for waiting in [parcel for parcel in self._open.values() if parcel.tier is tier]:
                        self._close(waiting)
                oldest = window.flights[0] if window.flights and not window.admits(capacity) else None
                if oldest is None:
                    parcel = self._load(run, tier, stream, capacity, account)
                    if parcel is None and small:  # no room for others: room for this one
                        parcel = self._load(run, tier, stream, round_up(size, GRAIN), account)
                    if parcel is None:
                        return None
                    if small:
                        self._open[run, tier, stream] = parcel
                    else:
                        parcel.closed = True
                    return self._assign(parcel, size, nbytes, account)
                motion = oldest.motion
            self._tell()
            assert motion is not None
            stall = None
            with suppress(ActstoreError):  # `_land` deals with writes that failed
                stall = self._device.wait(stream, motion)
            with self._lock:
                if stall is not None:
                    self._times.expect("stall", stall, tier.name, [(account, nbytes)])
                if oldest.state is State.OFFLOADING:
                    self._land(oldest)  # 3

    def depart(self, berth: Berth) -> None:
        """The encoding of a payload is queued on the current stream: its parcel leaves when it is full."""
        try:
            with self._lock:
                parcel = berth.parcel
                parcel.filling -= 1
                if parcel.closed and not parcel.filling and parcel.state is State.OPEN:
                    self._dispatch(parcel)
        except BaseException:  # an interrupt (Ctrl-C)
            self.drop(berth)
            raise

    def cancel(self, berth: Berth) -> None:
        """The payload was not encoded."""
        with self._lock:
            parcel = berth.parcel
            parcel.filling -= 1
            self._forget(berth)
            if parcel.closed and not parcel.filling and parcel.state is State.OPEN:
                self._dispatch(parcel)

    def flush(self, run: Run) -> None:
        """Send what waits for more payloads of a forward that has ended."""
        with self._lock:
            for parcel in [parcel for parcel in self._open.values() if parcel.run is run]:
                self._close(parcel)
            self._tidy()

    # -- backward -----------------------------------------------------------------------------------------------------

    def arrive(self, berth: Berth) -> torch.Tensor:
        """The bytes of a payload on the device, (nbytes,) uint8, for work on the current stream; call `leave` after it.

        Also starts to fetch what is expected next.

        Raises
        ------
        TransferError, PayloadError : the bytes cannot be read, or are not those written
        StateError : the payload was given back
        """
        stream, account = self._device.current(), berth.account
        with self._lock:
            self._tidy()
            parcel = berth.parcel
            if parcel.gone():
                raise StateError("this payload was given back; close the store after the last backward")
            if parcel.loan is not None and parcel.loan.spoiled():
                self._renounce(parcel.loan)
            parcel.run.ask(berth.serial)
            begun = parcel.state is State.FETCHING
            missed = parcel.state is State.RESIDENT
            if missed:
                self._fetch(parcel)
                account.misses += 1
            parcel.users += 1
            arrival = None
            if parcel.fetched or stream != parcel.home:
                arrival = parcel.arrival or self._device.record(parcel.home)
            try:
                self._look_ahead(parcel.run)
            except BaseException:
                parcel.users -= 1
                raise
        try:
            self._tell()
            stall = None if arrival is None else self._device.wait(stream, arrival)  # 5
        except BaseException as error:
            with self._lock:
                parcel.users -= 1
                if isinstance(error, ActstoreError) and parcel.motion is arrival:
                    self._give_up(parcel)
            raise
        with self._lock:
            if parcel.gone():  # by a close on another thread, which may have skipped the copy
                parcel.users -= 1
                if not parcel.users:
                    self._unload(parcel)
                raise StateError("this payload was given back; close the store after the last backward")
            if stall is not None:
                self._times.expect("stall", stall, parcel.tier.name, [(account, berth.nbytes)], judged=begun)
            elif not missed:
                self._ledger.judge(account, late=False)
                self._lookahead.in_time()
            if parcel.state is State.FETCHING and parcel.motion is arrival:
                self._turn_ready(parcel)
        return berth.memory

    def lend(self, berth: Berth, dtype: torch.dtype) -> torch.Tensor | None:
        """Like `arrive`, and the bytes become the memory of a 1-d tensor, which needs no `leave`: a copy less.

        Returns
        -------
        Tensor : None where the bytes have to be copied: on an accelerator, of small payloads, and where the tier does
            not have them, so that nobody could tell what they were once the tensor was changed
        """
        if not self._lendable(berth) or torch.is_inference_mode_enabled():
            return None
        self.arrive(berth)
        lent = None
        try:
            with self._lock:
                if berth.parcel.state is State.READY and self._lendable(berth):
                    lent = self._lend(berth, dtype)
            return berth.memory.clone().view(dtype) if lent is None else lent
        finally:
            if lent is None:
                self.leave(berth)

    def leave(self, berth: Berth) -> None:
        """The decoding of a payload is queued on the current stream."""
        read = self._device.record(self._device.current())
        with self._lock:
            parcel = berth.parcel
            parcel.reads = [ticket for ticket in parcel.reads if not ticket.ready()]
            parcel.reads.append(read)
            self._count_read(berth)
            if self._release(parcel, 1):
                self._look_ahead(parcel.run)

    # -- any time -----------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Let go of device memory whose bytes have arrived elsewhere, without waiting."""
        with self._lock:
            self._tidy()
        self._tell()

    def drop(self, berth: Berth) -> None:
        """Nobody needs a payload any more; takes effect at the next call of another method. Safe in finalizers."""
        self._dropped.put(berth)
        if self._closed:
            self._dropped.try_drain()

    def note(self, kind: Kind, ticket: Ticket, shares: list[tuple[Account, int]]) -> None:
        """Have the trace tell what else the device did."""
        with self._lock:
            self._times.expect(kind, ticket, "", shares)

    def start(self, step: int) -> None:
        """Begin a new step: return memory that the last one did not need."""
        with self._lock:
            self._tidy()
            self._times.step = step
            self._buffers.trim()

    def close(self) -> None:
        """Wait for what host threads still do to buffers, and return all memory. All berths were dropped before."""
        with self._lock:
            self._tidy()
            leaving, self._leaving = self._leaving, deque()
            for ticket, buffer, after in leaving:
                with suppress(ActstoreError):  # nobody needs these bytes any more
                    ticket.result()
                self._buffers.give(buffer, after)
            self._buffers.close()
            self._closed = True

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _window(self, tier: Tier) -> Window:
        window = self._windows.get(tier)
        if window is None:
            window = self._windows[tier] = Window(self._window_nbytes)
        return window

    def _load(self, run: Run, tier: Tier, stream: Any, capacity: int, account: Account) -> Parcel | None:
        """An empty parcel with room in `tier`, or None."""
        slot = tier.reserve(capacity)
        if slot is None:
            return None
        slot.tier = tier
        try:
            buffer = self._buffers.take(capacity)
        except BaseException:
            tier.free(slot)
            raise
        for ticket in buffer.after:  # 1
            stall = self._device.wait(stream, ticket)
            if stall is not None:
                self._times.expect("stall", stall, tier.name, [(account, capacity)])
        self._window(tier).nbytes += capacity
        self._ledger.occupy(tier.name, capacity)
        return Parcel(buffer, slot, stream, run)

    def _assign(self, parcel: Parcel, size: int, nbytes: int, account: Account) -> Berth:
        run = parcel.run
        berth = Berth(
            self, parcel, parcel.used, nbytes, account, run.number(id(account), nbytes, self._lookahead.limit_nbytes)
        )
        parcel.used += size
        parcel.filling += 1
        parcel.berths.add(berth)
        parcel.unread.add(berth)
        run.berths[berth.serial] = berth
        self._ledger.add(account, 0, 0, nbytes)
        return berth

    def _close(self, parcel: Parcel) -> None:
        """No more payloads for this parcel."""
        del self._open[parcel.run, parcel.tier, parcel.home]
        parcel.closed = True
        if not parcel.filling:
            self._dispatch(parcel)

    def _dispatch(self, parcel: Parcel) -> None:
        slot, buffer = parcel.slot, parcel.buffer
        assert slot is not None
        assert buffer is not None
        parcel.used = round_up(parcel.used, GRAIN)
        parcel.arrival = self._device.record(parcel.home)
        parcel.turn(State.OFFLOADING)
        self._window(parcel.tier).flights.append(parcel)
        try:
            parcel.motion = parcel.tier.write(slot, buffer.memory[: parcel.used], (parcel.arrival,))  # 2
        except BaseException as error:
            parcel.motion = DONE
            if not isinstance(error, ActstoreError | RuntimeError | OSError):
                self._strand(parcel, None)
                raise
            self._strand(parcel, error if isinstance(error, ActstoreError) else TransferError(str(error)))
            return
        self._times.expect("offload", parcel.motion, parcel.tier.name, _shares(parcel))

    def _land(self, parcel: Parcel) -> None:
        """The bytes have left the buffer, or the compute stream has been made to wait until they have."""
        motion = parcel.motion
        assert motion is not None
        if motion.ready():
            try:
                motion.result()
            except ActstoreError as error:
                self._strand(parcel, error)
                return
        self._leave_window(parcel)
        parcel.turn(State.READY)
        stays = parcel.users or self._stays(parcel)
        self._lookahead.nbytes += parcel.capacity
        self._ready[parcel] = None
        if not stays:
            self._evict(parcel)

    def _stays(self, parcel: Parcel) -> bool:
        """Whether a parcel that has left is to stay on the device too, because backward is about to ask for it.

        In backward it always does: it takes up no more than it did on its way, and a fetch would cost time.
        """
        soon = any(berth.serial in parcel.run.soon for berth in parcel.unread)
        return parcel.wanted() or (soon and self._lookahead.admits(parcel.capacity))

    def _strand(self, parcel: Parcel, error: ActstoreError | None) -> None:
        """A tier has lost a parcel, whose bytes are still on the device: there they stay. No error: an interrupt."""
        self._leave_window(parcel)
        self._free_slot(parcel)
        parcel.turn(State.READY)
        for berth in parcel.berths:
            berth.account.note = f"kept: {parcel.tier.name} failed"
        if error is not None and not isinstance(
            error, StateError
        ):  # else the tier was closed, or this is a forked child of who was to write
            self._troubles.append(error)

    def _fetch(self, parcel: Parcel) -> None:
        slot = parcel.slot
        assert slot is not None
        buffer = self._buffers.take(parcel.capacity)
        try:
            motion = parcel.tier.read(slot, buffer.memory[: parcel.used], buffer.after)  # 4
        except BaseException:
            self._buffers.forget(buffer)
            raise
        parcel.turn(State.FETCHING)
        parcel.buffer, parcel.motion, parcel.arrival, parcel.fetched = buffer, motion, motion, True
        parcel.unread = set(parcel.berths)
        for berth in parcel.berths:
            berth.reads = 0
        self._lookahead.nbytes += parcel.capacity
        self._fetching.append(parcel)
        self._book_held(parcel, 1)
        self._times.expect("fetch", motion, parcel.tier.name, _shares(parcel))

    def _lendable(self, berth: Berth) -> bool:
        parcel = berth.parcel
        return (
            self._device.on_host
            and berth.nbytes >= SMALL_NBYTES
            and parcel.slot is not None
            and parcel.state not in (State.OPEN, State.OFFLOADING)
        )

    def _lend(self, berth: Berth, dtype: torch.dtype) -> torch.Tensor:
        parcel = berth.parcel
        loan = parcel.loan
        tensor = None if loan is None else loan.again()
        if loan is None or tensor is None:
            loan, tensor = lend(parcel, berth.nbytes, dtype, self._returned.put)
            parcel.loan = loan
        loan.users += 1
        self._count_read(berth)
        return tensor

    def _take_back(self, loan: Loan) -> None:
        parcel = loan.parcel
        if parcel is None:
            return
        if parcel.loan is loan:
            if loan.spoiled() and not parcel.gone():
                self._renounce(loan)
                return
            parcel.loan = None
        self._release(parcel, loan.users)

    def _renounce(self, loan: Loan) -> None:
        """Somebody has changed the bytes of a parcel that were lent: the tier has them still."""
        parcel = loan.parcel
        assert parcel is not None
        assert parcel.buffer is not None
        loan.parcel = parcel.loan = None
        parcel.users -= loan.users
        self._buffers.forget(parcel.buffer)
        parcel.buffer = None
        self._evict(parcel)

    def _count_read(self, berth: Berth) -> None:
        berth.reads += 1
        if berth.reads >= berth.readers:
            berth.parcel.unread.discard(berth)

    def _release(self, parcel: Parcel, users: int) -> bool:
        """Some users have done with a parcel; whether it was dropped from the device because nobody is left."""
        parcel.users -= users
        if parcel.users:
            return False
        if parcel.gone():
            self._unload(parcel)
        elif parcel in self._ready and not parcel.unread:
            self._evict(parcel)
            return True
        return False

    def _turn_ready(self, parcel: Parcel) -> None:
        parcel.turn(State.READY)
        self._ready[parcel] = None

    def _evict(self, parcel: Parcel) -> None:
        """Drop what is on the device; the tier has it too."""
        del self._ready[parcel]
        self._lookahead.nbytes -= parcel.capacity
        self._book_held(parcel, -1)
        parcel.turn(State.RESIDENT)
        self._unload(parcel)

    def _give_up(self, parcel: Parcel) -> None:
        """A fetch has failed; the next `arrive` tries again."""
        if parcel.state is State.FETCHING:
            self._lookahead.nbytes -= parcel.capacity
            self._book_held(parcel, -1)
            parcel.turn(State.RESIDENT)
            self._unload(parcel)

    def _look_ahead(self, run: Run) -> None:
        """Fetch what is expected next, while bytes last."""
        while (berth := run.upcoming()) is not None:
            parcel = berth.parcel
            if parcel.state is State.RESIDENT:
                if not self._lookahead.admits(parcel.capacity) and not self._make_room(parcel.capacity):
                    return
                try:
                    self._fetch(parcel)
                except (torch.OutOfMemoryError, MemoryError):
                    self._lookahead.limit_nbytes //= 2  # it will be fetched when it is asked for
                    return
            run.passed()

    def _make_room(self, nbytes: int) -> bool:
        """Drop fetched parcels that nobody is expected to ask for."""
        for parcel in list(self._ready):
            if not parcel.users and not parcel.wanted():
                self._evict(parcel)
                if self._lookahead.admits(nbytes):
                    return True
        return False

    def _forget(self, berth: Berth) -> None:
        """Nobody needs a payload any more."""
        parcel = berth.parcel
        if berth not in parcel.berths:
            return
        parcel.berths.discard(berth)
        parcel.unread.discard(berth)
        parcel.run.forget(berth.serial)
        on_device = parcel.buffer is not None
        self._ledger.release(berth.account, berth.nbytes * on_device, berth.nbytes * (not on_device))
        if parcel.berths:
            return
        state = parcel.state
        if state is State.OPEN:
            if not parcel.closed:
                del self._open[parcel.run, parcel.tier, parcel.home]
            parcel.reads.append(self._device.record(parcel.home))
            self._window(parcel.tier).nbytes -= parcel.capacity
        elif state is State.OFFLOADING:
            self._leave_window(parcel)
        elif state in (State.READY, State.FETCHING) and parcel.slot is not None:
            self._ready.pop(parcel, None)
            self._lookahead.nbytes -= parcel.capacity
        parcel.turn(State.DROPPED)
        self._free_slot(parcel)
        if not parcel.users:
            self._unload(parcel)

    def _free_slot(self, parcel: Parcel) -> None:
        slot, parcel.slot = parcel.slot, None
        if slot is not None:
            slot.tier.free(slot)
            self._ledger.occupy(parcel.tier.name, -slot.nbytes)

    def _unload(self, parcel: Parcel) -> None:
        """Let go of a parcel's buffer."""
        buffer, parcel.buffer = parcel.buffer, None
        if buffer is None:
            return
        motion = parcel.motion
        # A copy by a host thread that had not begun when its slot was freed was skipped: it did not come after these.
        before = buffer.after if parcel.fetched else (parcel.arrival,)
        after = [ticket for ticket in (*before, *parcel.reads) if ticket is not None and not ticket.ready()]
        parcel.reads = []
        if motion is None or motion.ready():
            self._buffers.give(buffer, after)  # 6
        elif motion.on_stream:
            self._buffers.give(buffer, [motion, *after])
        else:
            self._leaving.append((motion, buffer, after))

    def _leave_window(self, parcel: Parcel) -> None:
        window = self._window(parcel.tier)
        window.flights.remove(parcel)
        window.nbytes -= parcel.capacity

    def _book_held(self, parcel: Parcel, sign: int) -> None:
        """Book payloads as come to the device, or as gone from it. They count there while they are in both places."""
        for berth in parcel.berths:
            self._ledger.add(berth.account, 0, 0, sign * berth.nbytes, -sign * berth.nbytes)

    def _tidy(self) -> None:
        """Take note of what has happened since the last time."""
        self._dropped.drain_locked()
        self._returned.drain_locked()
        for window in self._windows.values():
            while window.flights and (motion := window.flights[0].motion) is not None and motion.ready():
                self._land(window.flights[0])
        while self._fetching:
            parcel = self._fetching[0]
            if parcel.state is State.FETCHING and parcel.motion is not None:
                if not parcel.motion.ready():
                    break
                if not parcel.users:
                    try:
                        parcel.motion.result()
                    except ActstoreError:
                        self._give_up(parcel)  # who asks for it will be told
                    else:
                        self._turn_ready(parcel)
            self._fetching.popleft()
        while self._leaving and self._leaving[0][0].ready():
            _, buffer, after = self._leaving.popleft()
            self._buffers.give(buffer, after)
        for late, nbytes in self._times.settle():
            if late:
                self._lookahead.late(nbytes)
            else:
                self._lookahead.in_time()

    def _tell(self) -> None:
        """Warn of writes that failed; called without the lock, because a warning may be an exception."""
        while self._troubles:
            error = self._troubles.popleft()
            if not self._told:
                self._told = True
                warnings.warn(
                    f"activations could not leave the device: {error}. They stay there, and gradients are right; but "
                    "memory is not saved. Give disk_path= a folder on a disk that works, or leave the tier out.",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _shares(parcel: Parcel) -> list[tuple[Account, int]]:
    return [(berth.account, berth.nbytes) for berth in parcel.berths]
