"""Moves payloads between the compute device and the tiers, each once, in time, and within bounds.

Order of the operations on the memory of one parcel; the numbers stand at the code, here and in traffic.py:

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

import torch

from actstore.base.ledger import Account, Ledger
from actstore.base.reaper import Reaper
from actstore.base.ticket import Ticket
from actstore.base.units import round_up
from actstore.devices import Device
from actstore.errors import ActstoreError, StateError
from actstore.tiers import Tier
from actstore.trace import Kind, Trace
from actstore.transfer.loan import Loan
from actstore.transfer.order import Lessons, TransferRun
from actstore.transfer.parcel import Berth, Parcel, ParcelState
from actstore.transfer.timekeeper import Timekeeper
from actstore.transfer.traffic import GRAIN, Traffic

DEVICE_WINDOW_NBYTES = 256 * 2**20  # copies on a stream: about 5 ms of a 55 GB/s link
HOST_WINDOW_NBYTES = 32 * 2**20  # writes of host threads: four of a chunk each

SMALL_NBYTES = 2**20  # smaller payloads travel together
PARCEL_NBYTES = 4 * 2**20
PARCELS = 256  # make up the limit of what is held, at least
PARCELS_ON_THEIR_WAY = 8  # make up the bound of what waits on the device, at least
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
        self._traffic = traffic = Traffic(device, ledger, window_nbytes, Timekeeper(ledger, trace), poison=poison)
        self._lock = Lock()
        self._dropped = Reaper[Berth](self._lock, traffic.forget)
        self.drop = self._dropped.put  # nobody needs a payload any more: one call in C, for finalizers
        self._returned = Reaper[Loan[Parcel]](self._lock, traffic.take_back)
        self._lessons = Lessons()
        self._told = False

    # -- forward ------------------------------------------------------------------------------------------------------

    def begin(self) -> TransferRun[Berth]:
        """A new forward pass."""
        return TransferRun(self._lessons)

    def admits(self, run: TransferRun[Berth], tier: Tier, nbytes: int) -> bool:
        """Whether a payload could leave for `tier` now without waiting for others."""
        with self._lock:
            self._tidy()
            return self._traffic.quota.may_leave(run, tier, round_up(nbytes, GRAIN)) and self._traffic.shed(nbytes)

    def make_room(self, nbytes: int) -> None:
        """Have `nbytes` more fit within the limit of what is held, as far as something is on its way out or came early.

        The compute stream waits for copies out; the host waits only where a host thread is the one that copies.
        """
        while True:
            with self._lock:
                self._tidy()
                windows = self._traffic.quota.windows.values()
                oldest = None if self._traffic.shed(nbytes) else self._traffic.oldest(windows)
                shares = [] if oldest is None else oldest.shares()
            if oldest is None:
                self._tell()
                return
            self._wait_for(oldest, shares)

    def board(self, run: TransferRun[Berth], tier: Tier, nbytes: int, account: Account) -> Berth | None:
        """Room for one payload on the device, and in `tier`; None when the tier is full.

        When the window is full, or the limit of what is held, the compute stream waits for the oldest copy; the host
        waits only where a host thread is the one that copies. Call `depart` once the payload's encoding is queued, or
        `cancel`.
        """
        stream = self._device.current()
        size = round_up(max(nbytes, 1), BERTH)
        small = size < SMALL_NBYTES
        if not self._traffic.ledger.fits(nbytes):
            self.make_room(nbytes)
        while True:
            with self._lock:
                self._tidy()
                parcel = self._traffic.open.get((run, tier, stream)) if small else None
                if parcel is not None:
                    if parcel.used + size <= parcel.capacity:
                        return self._traffic.assign(self, parcel, size, nbytes, account)
                    self._traffic.seal(parcel)
                run.recall(id(account))
                capacity = round_up(max(size, self._together(run) if small else 0), GRAIN)
                quota = self._traffic.quota
                may_leave = quota.may_leave(run, tier, capacity)
                oldest = None if may_leave else self._traffic.oldest([quota.window(tier)])
                if oldest is None:
                    parcel = self._traffic.load(run, tier, stream, capacity, account)
                    if parcel is None and small:  # no room for others: room for this one
                        parcel = self._traffic.load(run, tier, stream, round_up(size, GRAIN), account)
                    if parcel is None:
                        return None
                    if small:
                        self._traffic.open[run, tier, stream] = parcel
                    else:
                        parcel.closed = parcel.alone = True
                    return self._traffic.assign(self, parcel, size, nbytes, account)
            self._wait_for(oldest, [(account, nbytes)])

    def _together(self, run: TransferRun[Berth]) -> int:
        """Return the bytes of a parcel of several payloads of `run`.

        It leaves and comes back as a whole: where little may be on the device, little comes along that backward does
        not want yet. A power of two, so that buffers fit from step to step.
        """
        share = self._traffic.quota.limit_nbytes(run) // PARCELS_ON_THEIR_WAY
        most = int(min(1 << max(0, share.bit_length() - 1), self._traffic.ledger.limit / PARCELS))
        return min(PARCEL_NBYTES, most)

    def depart(self, berth: Berth) -> None:
        """The encoding of a payload is queued on the current stream: its parcel leaves when it is full."""
        try:
            with self._lock:
                parcel = berth.parcel
                parcel.filling -= 1
                if parcel.closed and not parcel.filling and parcel.state is ParcelState.OPEN:
                    self._traffic.dispatch(parcel)
        except BaseException:  # an interrupt (Ctrl-C)
            self.drop(berth)
            raise

    def cancel(self, berth: Berth) -> None:
        """The payload was not encoded."""
        with self._lock:
            parcel = berth.parcel
            parcel.filling -= 1
            self._traffic.forget(berth)
            if parcel.closed and not parcel.filling and parcel.state is ParcelState.OPEN:
                self._traffic.dispatch(parcel)

    def peek(self, berth: Berth) -> torch.Tensor | None:
        """Lend the bytes of a payload where they were encoded, to work on the same stream; None where they have left.

        Call `peeked` after that work. Nothing moves, and no order is learned of it.
        """
        with self._lock:
            parcel = berth.parcel
            here = parcel.buffer is not None and not parcel.fetched and parcel.loan is None
            if not here or parcel.home != self._device.current():
                return None
            self._traffic.use(parcel, 1)
            return berth.memory

    def peeked(self, berth: Berth) -> None:
        """Note that the work on what `peek` gave is queued."""
        read = self._device.record(self._device.current())
        with self._lock:
            berth.parcel.reads.append(read)
            self._traffic.release(berth.parcel, 1)

    def flush(self, run: TransferRun[Berth]) -> None:
        """Send what waits for more payloads of a forward that has ended."""
        with self._lock:
            for parcel in [parcel for parcel in self._traffic.open.values() if parcel.run is run]:
                self._traffic.seal(parcel)
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
        while (memory := self._arrive(berth)) is None:
            pass
        return memory

    def _arrive(self, berth: Berth) -> torch.Tensor | None:
        """`arrive`, once; None where another thread has changed the bytes, which it was lent: the tier has them."""
        stream, account = self._device.current(), berth.account
        if berth.parcel.state is ParcelState.RESIDENT and not self._traffic.ledger.fits(berth.parcel.used):
            self.make_room(berth.parcel.used)
        with self._lock:
            self._tidy()
            parcel = berth.parcel
            if parcel.gone():
                raise StateError("this payload was given back; close the store after the last backward")
            if parcel.loan is not None and parcel.loan.spoiled():
                self._traffic.renounce(parcel.loan)
            begun = parcel.state is ParcelState.FETCHING
            missed = parcel.state is ParcelState.RESIDENT
            if missed and parcel.run.upcoming() is berth:  # what was looked ahead to took all the room
                self._traffic.quota.lookahead.late(parcel.capacity)
            parcel.run.ask(berth.serial)
            if missed:
                self._traffic.fetch(parcel)
                account.misses += 1
            self._traffic.use(parcel, 1)
            arrival, buffer = None, parcel.buffer
            if parcel.fetched or stream != parcel.home:
                arrival = parcel.arrival or self._device.record(parcel.home)
            try:
                self._traffic.look_ahead(parcel.run)
            except BaseException:
                self._traffic.release(parcel, 1)
                raise
        try:
            self._tell()
            stall = None if arrival is None else self._device.wait(stream, arrival)  # 5
        except BaseException as error:
            with self._lock:
                self._traffic.release(parcel, 1)
                if isinstance(error, ActstoreError) and parcel.motion is arrival:
                    self._traffic.give_up(parcel)
            raise
        with self._lock:
            if parcel.gone():  # by a close on another thread, which may have skipped the copy
                self._traffic.release(parcel, 1)
                raise StateError("this payload was given back; close the store after the last backward")
            if parcel.buffer is not buffer:
                self._traffic.release(parcel, 1)
                return None
            if stall is not None:
                self._traffic.times.expect("stall", stall, parcel.tier.name, [(account, berth.nbytes)], judged=begun)
            elif not missed:
                self._traffic.ledger.judge(account, late=False)
                self._traffic.quota.lookahead.in_time()
            if parcel.state is ParcelState.FETCHING and parcel.motion is arrival:
                self._traffic.turn_ready(parcel)
            return berth.memory

    def lend(self, berth: Berth, dtype: torch.dtype) -> torch.Tensor | None:
        """Like `arrive`, and the bytes become the memory of a 1-d tensor, which needs no `leave`: a copy less.

        Returns
        -------
        Tensor : None where the bytes have to be copied: on an accelerator, of small payloads, and where the tier does
            not have them, so that nobody could tell what they were once the tensor was changed
        """
        if torch.is_inference_mode_enabled():
            return None
        while self._traffic.lendable(berth):
            self.arrive(berth)
            lent = None
            with self._lock:
                try:
                    if berth.parcel.state is ParcelState.READY and self._traffic.lendable(berth):
                        lent = self._traffic.lend(berth, dtype, self._returned.put)
                        return lent
                finally:
                    if lent is None:  # another thread has found the bytes changed: they are fetched anew
                        self._traffic.release(berth.parcel, 1)
        return None

    def leave(self, berth: Berth) -> None:
        """The decoding of a payload is queued on the current stream."""
        read = self._device.record(self._device.current())
        with self._lock:
            parcel = berth.parcel
            parcel.reads = [ticket for ticket in parcel.reads if not ticket.ready()]
            parcel.reads.append(read)
            self._traffic.count_read(berth)
            if self._traffic.release(parcel, 1):
                self._traffic.look_ahead(parcel.run)

    # -- any time -----------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Let go of device memory whose bytes have arrived elsewhere, without waiting."""
        with self._lock:
            self._tidy()
        self._tell()

    def resize(self, window_nbytes: int) -> None:
        """Let at most so many bytes be on their way to one tier, or fetched ahead, from now on."""
        with self._lock:
            self._traffic.quota.resize(window_nbytes)

    def note(self, kind: Kind, ticket: Ticket, shares: list[tuple[Account, int]]) -> None:
        """Have the trace tell what else the device did."""
        with self._lock:
            self._traffic.times.expect(kind, ticket, "", shares)

    def start(self, step: int) -> None:
        """Begin a new step: return memory that the last one did not need."""
        with self._lock:
            self._tidy()
            self._traffic.times.step = step
            self._traffic.buffers.trim()
            self._lessons.differed = ""

    def left_ns(self) -> int:
        """Return when the last copy out ended, on the clock of `perf_counter_ns`; now, while one runs."""
        with self._lock:
            return self._traffic.times.left_ns()

    def bound_nbytes(self, run: TransferRun[Berth]) -> int:
        """Return the most bytes of `run` that wait on the device although a tier has them or is about to."""
        with self._lock:
            return self._traffic.quota.limit_nbytes(run)

    @property
    def differed(self) -> str:
        """As in `Lessons`, in this step so far."""
        return self._lessons.differed

    @property
    def window_nbytes(self) -> int:
        """Most bytes that leave for one tier at once, and that are fetched ahead."""
        return self._traffic.quota.window_nbytes

    def close(self) -> None:
        """Wait for what host threads still do to buffers, and return all memory. All berths were dropped before."""
        with self._lock:
            self._tidy()
            leaving, self._traffic.leaving = self._traffic.leaving, deque()
            for ticket, buffer, after in leaving:
                with suppress(ActstoreError):  # nobody needs these bytes any more
                    ticket.result()
                self._traffic.buffers.give(buffer, after)
            self._traffic.buffers.close()

    # -----------------------------------------------------------------------------------------------------------------

    def _wait_for(self, parcel: Parcel, shares: list[tuple[Account, int]]) -> None:
        """Have the compute stream wait until a parcel has left; `shares` say for whose sake."""
        self._tell()
        motion, stall = parcel.motion, None
        assert motion is not None
        with suppress(ActstoreError):  # `land` deals with writes that failed
            stall = self._device.wait(self._device.current(), motion)
        with self._lock:
            if stall is not None:
                self._traffic.times.expect("stall", stall, parcel.tier.name, shares, for_room=True)
            if parcel.state is ParcelState.OFFLOADING:
                self._traffic.land(parcel)  # 3

    def _tidy(self) -> None:
        """Take note of what has happened since the last time; the caller owns the lock."""
        self._dropped.drain_locked()
        self._returned.drain_locked()
        self._traffic.tidy()

    def _tell(self) -> None:
        """Warn of writes that failed; called without the lock, because a warning may be an exception."""
        while self._traffic.troubles:
            error = self._traffic.troubles.popleft()
            if not self._told:
                self._told = True
                warnings.warn(
                    f"activations could not leave the device: {error}. They stay there, and gradients are right; but "
                    "memory is not saved. Give Disk(path) a folder on a disk that works, or leave the tier out.",
                    RuntimeWarning,
                    stacklevel=2,
                )
