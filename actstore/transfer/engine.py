"""The engine, which moves payloads between the compute device and the tiers.

Order of the operations on the memory of one parcel; comments here and in traffic.py refer to these numbers:

1. the compute stream encodes the payloads into the buffer, after the buffer's last uses;
2. the tier copies the buffer out, after 1; the host does not wait;
3. the buffer is reused after 2: by a stream that waits for it, or once the host has seen its end;
4. the tier copies the payload back into a buffer, after 2 and after that buffer's last uses;
5. the compute stream decodes, after 4 (or after 1, while the buffer still has the bytes);
6. the buffer is reused after 5.
The engine touches a user's tensor only on the stream that was current when autograd packed or unpacked it.
"""

from __future__ import annotations

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
from actstore.transfer.order import Lessons, TransferRun
from actstore.transfer.parcel import Berth, Loan, Parcel, ParcelState
from actstore.transfer.timekeeper import Timekeeper
from actstore.transfer.traffic import GRAIN_NBYTES, Traffic

DEVICE_WINDOW_NBYTES = 256 * 2**20  # about 5 ms of copies on a 55 GB/s link
HOST_WINDOW_NBYTES = 32 * 2**20  # four writes of host threads, of a chunk each
SMALL_NBYTES = 2**20  # smaller payloads share parcels
PARCEL_NBYTES = 4 * 2**20
ACCELERATOR_FACTOR = 16  # times both on an accelerator, whose host queues a copy in about the time of 16 MiB
MIN_PARCELS_PER_LIMIT = 256  # minimum of shared parcels within the limit of held bytes
MIN_PARCELS_PER_BOUND = 8  # minimum of shared parcels within the bound of bytes in transit on the device
BERTH_ALIGN_NBYTES = 64


def most_parcel_nbytes(*, on_host: bool) -> int:
    """Return the upper bound of a shared parcel, on a device with or without host memory."""
    return PARCEL_NBYTES if on_host else ACCELERATOR_FACTOR * PARCEL_NBYTES


class Engine:
    """Mover of payloads of one compute device. Thread-safe; `drop` is safe in finalizers.

    Parameters
    ----------
    device : the device of the payloads
    ledger : the books of bytes by place
    window_nbytes : bound on bytes that leave for one tier at once, and on bytes fetched ahead; None for a default,
        which the bytes fetched ahead exceed where the link was idle while compute waited
    trace : the record of each copy and each stall, if any
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
        self._small_nbytes = SMALL_NBYTES * (1 if device.on_host else ACCELERATOR_FACTOR)
        self._parcel_nbytes = most_parcel_nbytes(on_host=device.on_host)
        self._follows = window_nbytes is None and not device.on_host  # whether the bound grows with bursts
        window_nbytes = window_nbytes or (HOST_WINDOW_NBYTES if device.on_host else DEVICE_WINDOW_NBYTES)
        self._device = device
        self._traffic = traffic = Traffic(device, ledger, window_nbytes, Timekeeper(ledger, trace), poison=poison)
        self._lock = Lock()
        self._dropped = Reaper[Berth](self._lock, traffic.forget)
        self.drop = self._dropped.put  # the last reader of a payload died: one call in C, for finalizers
        self._returned = Reaper[Loan](self._lock, traffic.take_back)
        self._lessons = Lessons()

    # -- forward ------------------------------------------------------------------------------------------------------

    def begin(self) -> TransferRun[Berth]:
        """Begin a forward pass."""
        return TransferRun(self._lessons)

    def admits(self, run: TransferRun[Berth], tier: Tier, nbytes: int) -> bool:
        """Return whether a payload can leave for `tier` now, before another copy ends."""
        with self._lock:
            self._tidy()
            may_leave = self._traffic.quota.may_leave(run, tier, round_up(nbytes, GRAIN_NBYTES))
            return may_leave and self._traffic.shed(nbytes)

    def make_room(self, nbytes: int) -> None:
        """Free device memory until `nbytes` more fit within the limit of all that is held, as far as possible.

        Parcels that are on their way out, or were fetched early, give memory. The compute stream waits for copies out;
        the host waits only where a host thread does the copy.
        """
        while True:
            with self._lock:
                self._tidy()
                windows = self._traffic.quota.windows.values()
                oldest = None if self._traffic.shed(nbytes) else self._traffic.oldest(windows)
                shares = [] if oldest is None else oldest.shares()
            if oldest is None:
                self._traffic.tell()
                return
            self._wait_for(oldest, shares)

    def board(self, run: TransferRun[Berth], tier: Tier, nbytes: int, account: Account) -> Berth | None:
        """Reserve a berth for one payload on the device, and memory in `tier`. Returns None when the tier is full.

        When the window or the limit of all that is held is full, the compute stream waits for the oldest copy; the host
        waits only where a host thread does the copy. Call `depart` once the payload's encoding is queued, or `cancel`.
        """
        size = nbytes if tier.alone else round_up(max(nbytes, 1), BERTH_ALIGN_NBYTES)
        small = size < self._small_nbytes and not tier.alone
        stream, parcel, berth = self._device.current(), None, None
        if not self._traffic.ledger.fits(nbytes):
            self.make_room(nbytes)
        try:
            while True:
                with self._lock:
                    self._tidy()
                    parcel = self._traffic.open.get((run, tier, stream)) if small else None
                    if parcel is not None and parcel.used + size > parcel.capacity:
                        self._traffic.seal(parcel)
                        parcel = None
                    oldest = None
                    if parcel is None:
                        run.recall(id(account))
                        capacity = round_up(max(size, self._together(run) if small else 1), GRAIN_NBYTES)
                        if not self._traffic.quota.may_leave(run, tier, capacity):
                            oldest = self._traffic.oldest([self._traffic.quota.window(tier)])
                    if parcel is None and oldest is None:
                        parcel = self._traffic.load(run, tier, stream, capacity, account)
                        if parcel is None and small:  # no room for a shared parcel: reserve for this payload alone
                            parcel = self._traffic.load(run, tier, stream, round_up(size, GRAIN_NBYTES), account)
                        if parcel is None:
                            return None
                        if small:
                            self._traffic.open[run, tier, stream] = parcel
                        else:
                            parcel.closed = parcel.alone = True
                    if oldest is None:
                        assert parcel is not None
                        berth = self._traffic.assign(self, parcel, size, nbytes, account)
                        if not parcel.closed and parcel.used == parcel.capacity:
                            self._traffic.seal(parcel)
                        return berth
                self._wait_for(oldest, [(account, nbytes)])
        except BaseException:  # an interrupt (Ctrl-C), also as the lock is given back
            if berth is not None:
                self.cancel(berth)
            with self._lock:
                if parcel is not None:
                    self._traffic.drop_empty(parcel)
            raise

    def _together(self, run: TransferRun[Berth]) -> int:
        """Return the size in bytes of a parcel that several payloads of `run` share.

        A parcel leaves and comes back as a whole. Where little may be on the device, a small parcel brings few bytes
        that backward does not need yet. The size is a power of two, so that buffers fit from step to step.
        """
        share = self._traffic.quota.limit_nbytes(run) // MIN_PARCELS_PER_BOUND
        most = int(min(1 << max(0, share.bit_length() - 1), self._traffic.ledger.budget.limit / MIN_PARCELS_PER_LIMIT))
        return min(self._parcel_nbytes, most)

    def depart(self, berth: Berth) -> None:
        """Send the parcel of a payload when it is full. The payload's encoding is queued on the current stream."""
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
        """Give back the berth of a payload whose encoding failed."""
        with self._lock:
            parcel = berth.parcel
            parcel.filling -= 1
            self._traffic.forget(berth)
            if parcel.closed and not parcel.filling and parcel.state is ParcelState.OPEN:
                self._traffic.dispatch(parcel)

    def peek(self, berth: Berth) -> torch.Tensor | None:
        """Lend the bytes of a payload where they were encoded, to work on the same stream; None where they have left.

        Call `peeked` after that work. The engine moves nothing, and learns no order of it.
        """
        with self._lock:
            parcel = berth.parcel
            here = parcel.buffer is not None and not parcel.fetched and parcel.loan is None
            if not here or parcel.home != self._device.current():
                return None
            self._traffic.use(parcel, 1)
            return berth.memory

    def peeked(self, berth: Berth) -> None:
        """Note that the work on the bytes of `peek` is queued."""
        stream = self._device.current()
        with self._lock:
            berth.parcel.reads.add(stream)
            self._traffic.release(berth.parcel, 1)

    def flush(self, run: TransferRun[Berth]) -> None:
        """Send the parcels of a forward that has ended, although they have room for more payloads."""
        with self._lock:
            for parcel in [parcel for parcel in self._traffic.open.values() if parcel.run is run]:
                self._traffic.seal(parcel)
            self._tidy()

    # -- backward -----------------------------------------------------------------------------------------------------

    def arrive(self, berth: Berth) -> torch.Tensor:
        """Return a payload's bytes on the device, (nbytes,) uint8, for the current stream. Call `leave` after use.

        Also starts to fetch the payloads that backward is expected to read next.

        Raises
        ------
        TransferError, PayloadError : the bytes cannot be read, or differ from those written
        StateError : the store has freed the payload
        """
        while (memory := self._arrive(berth)) is None:
            pass
        return memory

    def _arrive(self, berth: Berth) -> torch.Tensor | None:
        """Try `arrive` once. Returns None where another thread has changed lent bytes: the tier has the payload."""
        stream, account = self._device.current(), berth.account
        if berth.parcel.state is ParcelState.RESIDENT and not self._traffic.ledger.fits(berth.parcel.used):
            self.make_room(berth.parcel.used)
        with self._lock:
            self._tidy()
            parcel = berth.parcel
            if parcel.state is ParcelState.DROPPED:
                raise StateError("this payload was given back. Close the store after the last backward.")
            if parcel.loan is not None and parcel.loan.is_changed():
                self._traffic.renounce(parcel.loan)
            begun = parcel.state is ParcelState.FETCHING
            missed = parcel.state is ParcelState.RESIDENT
            if missed and parcel.run.upcoming() is berth:  # the payloads fetched ahead took all the room
                self._traffic.quota.lookahead.late(parcel.capacity)
            parcel.run.ask(berth.serial)
            if missed:
                self._traffic.fetch(parcel)
                account.misses += self._device.timing
            self._traffic.use(parcel, 1)
            arrival, buffer = None, parcel.buffer
            awaited = parcel.fetched and stream in parcel.reads  # by the decoding of another payload
            if not awaited and (parcel.fetched or stream != parcel.home):
                arrival = parcel.arrival or self._device.record(parcel.home)
            try:
                self._traffic.look_ahead(parcel.run)
            except BaseException:
                self._traffic.release(parcel, 1)
                raise
            here = arrival is None or (parcel.state is ParcelState.READY and self._device.on_host)
            if here and not self._traffic.troubles:  # nothing to wait for
                self._traffic.count_in_time(account)
                return berth.memory
        try:
            self._traffic.tell()
            stall = None if arrival is None else self._device.wait(stream, arrival)  # 5
        except BaseException as error:
            with self._lock:
                self._traffic.release(parcel, 1)
                if isinstance(error, ActstoreError) and parcel.motion is arrival:
                    self._traffic.give_up(parcel)
            raise
        with self._lock:
            if parcel.gone():  # closed by another thread, which may have skipped the copy
                self._traffic.release(parcel, 1)
                raise StateError("this payload was given back. Close the store after the last backward.")
            if parcel.buffer is not buffer:
                self._traffic.release(parcel, 1)
                return None
            if stall is not None:
                self._traffic.times.expect("stall", stall, parcel.tier.name, [(account, berth.nbytes)], judged=begun)
            elif not missed:
                self._traffic.count_in_time(account)
            if parcel.state is ParcelState.FETCHING and parcel.motion is arrival:
                self._traffic.turn_ready(parcel)
            return berth.memory

    def lend(self, berth: Berth, dtype: torch.dtype, *, for_good: bool = False) -> torch.Tensor | None:
        """Fetch like `arrive`, but make the bytes the memory of a 1-d tensor, without a copy and without `leave`.

        Returns None where the bytes must be copied: on an accelerator, for small payloads, and where the tier does not
        have them, as a change would lose them. With `for_good` it waits for the tier, and they go with the tensor.
        """
        if torch.is_inference_mode_enabled():
            return None
        if for_good and self._device.on_host and berth.parcel.alone and berth.parcel.state is ParcelState.OFFLOADING:
            self._wait_for(berth.parcel, [(berth.account, berth.nbytes)])
        while self._traffic.lendable(berth):
            self.arrive(berth)
            lent = None
            with self._lock:
                try:
                    if berth.parcel.state is ParcelState.READY and self._traffic.lendable(berth):
                        lent = self._traffic.lend(berth, dtype, self._returned.put, for_good=for_good)
                        return lent
                finally:
                    if lent is None:  # another thread has found the bytes changed: fetch them anew
                        self._traffic.release(berth.parcel, 1)
        return None

    def leave(self, berth: Berth) -> None:
        """Note that the decoding of a payload is queued on the current stream."""
        stream = self._device.current()
        with self._lock:
            parcel = berth.parcel
            parcel.reads.add(stream)
            berth.count_read()
            if self._traffic.release(parcel, 1):
                self._traffic.look_ahead(parcel.run)

    # -- any time -----------------------------------------------------------------------------------------------------

    def poll(self, begun: TransferRun[Berth] | None = None) -> None:
        """Free memory whose bytes have arrived in a tier, without waiting. Fetch ahead for a run that `begun` is."""
        with self._lock:
            self._tidy()
            if begun is not None:
                begun.foresee()
                self._traffic.look_ahead(begun)
        self._traffic.tell()

    def resize(self, window_nbytes: int) -> None:
        """Set the bound on bytes that are on their way to one tier, and on bytes fetched ahead."""
        with self._lock:
            self._follows = False
            self._traffic.quota.resize(window_nbytes)

    def widen(self) -> None:
        """Fetch as many bytes ahead as the window admits, as after many late copies."""
        with self._lock:
            self._traffic.quota.lookahead.widen()

    def note(self, kind: Kind, ticket: Ticket, shares: list[tuple[Account, int]]) -> None:
        """Record an operation of the device in the trace, once its ticket is complete."""
        with self._lock:
            self._traffic.times.expect(kind, ticket, "", shares)

    def start(self, step: int, *, timed: bool = True) -> None:
        """Begin a step, with `timed` copies or without: return memory that the last step did not need."""
        with self._lock:
            self._tidy()
            self._widen(step)
            self._device.time(timing=timed)
            self._traffic.buffers.trim()
            self._lessons.differed = ""

    def _widen(self, step: int) -> None:
        """Let more bytes come back early where the link was idle while compute waited, by half of what is free."""
        quota = self._traffic.quota
        now = quota.back_nbytes
        wanted = self._traffic.times.start(step, now, changed=bool(self._lessons.differed))
        if self._follows and wanted > now:
            quota.widen(min(wanted, now + self._device.spare_nbytes() // 2))

    def left_ns(self) -> int:
        """Return the end of the last copy out, on the clock of `perf_counter_ns`; the present while one runs."""
        with self._lock:
            return self._traffic.times.left_ns()

    def bound_nbytes(self, run: TransferRun[Berth]) -> int:
        """Return the bound on bytes of `run` that wait on the device although a tier has them or is about to."""
        with self._lock:
            return self._traffic.quota.limit_nbytes(run)

    @property
    def differed(self) -> str:
        """Difference of the last lesson in this step, as in `Lessons`."""
        return self._lessons.differed

    @property
    def window_nbytes(self) -> int:
        """Bound on bytes that leave for one tier at once, and on bytes fetched ahead."""
        return self._traffic.quota.window_nbytes

    def close(self) -> None:
        """Wait until host threads have done with buffers, and return all memory. All berths were dropped before."""
        with self._lock:
            self._tidy()
            for ticket, _, _ in self._traffic.leaving:
                with suppress(ActstoreError):  # the payloads are dropped: a failed write loses nothing
                    ticket.result()
            self._traffic.tidy()
            self._traffic.buffers.close()

    def _wait_for(self, parcel: Parcel, shares: list[tuple[Account, int]]) -> None:
        """Make the compute stream wait until a parcel has left, and book the wait to `shares`."""
        self._traffic.tell()
        motion, stall = parcel.motion, None
        assert motion is not None
        with suppress(ActstoreError):  # `land` handles failed writes
            stall = self._device.wait(self._device.current(), motion)
        with self._lock:
            if stall is not None:
                self._traffic.times.expect("stall", stall, parcel.tier.name, shares, for_room=True)
            if parcel.state is ParcelState.OFFLOADING:
                self._traffic.land(parcel)  # 3

    def _tidy(self) -> None:
        """Process the drops, returns and copies since the last call. The caller holds the lock."""
        if self._dropped.queue:
            self._dropped.drain_locked()
        if self._returned.queue:
            self._returned.drain_locked()
        self._traffic.tidy()
