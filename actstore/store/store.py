"""Store of payloads: encodes tensors into tiers and decodes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from threading import Lock
from time import perf_counter_ns
from typing import Any, TypeVar
from weakref import ref

import torch

from actstore.base.ledger import Account, Circumstances, Claim, Ledger
from actstore.base.reaper import Finalizer
from actstore.base.ticket import DONE, Between
from actstore.base.units import format_nbytes, round_up
from actstore.codecs import Codec
from actstore.errors import CapacityError, StateError
from actstore.kernels.base import ALIGN, LENGTH_NBYTES
from actstore.store.comparison import Later
from actstore.store.observers import Gauge, PayloadSampler, StoreObservers
from actstore.store.payload import ForwardPass, Payload, Route
from actstore.store.tierset import StoreOptions, TierSet
from actstore.tiers import Disk, Slot
from actstore.trace import Trace
from actstore.transfer import Berth, Readback, Readbacks


class VariablePayloads:
    """Payloads of variable size on one compute device.

    A tensor is encoded into room for the longest payload, and its bytes move to room for just these: at once where the
    compute device is a CPU. On an accelerator the payload stays there until its length has come to the host. The host
    does not wait: `move_known` and later payloads look.
    """

    def __init__(self, place: TierSet, ledger: Ledger) -> None:
        self._place = place
        self._ledger = ledger
        self._lengths = Readbacks(place.device, LENGTH_NBYTES)
        self._waiting: deque[tuple[ref[Payload], Readback, Sequence[str], ForwardPass]] = deque()  # for their lengths

    def put(self, entry: Payload, src: torch.Tensor, route: Route, saved: int, forward: ForwardPass) -> int | None:
        """Encode `src`. Returns the length of the payload if no tier has room for it; else None."""
        place, tiers, bound = self._place, route.tiers, entry.bound
        stage = place.stage(bound.nbytes)
        try:
            used = bound.encode(src, stage.memory, entry.key)
            late = None if place.device.on_host else self._lengths.expect(stage.memory)
        except BaseException:
            stage.tier.free(stage)
            raise
        entry.room = stage
        entry.last = self._ledger.hold(entry.account, saved, 0, stage.nbytes)
        if late is not None:
            with self._place.late_lock:
                self._waiting.append((ref(entry), late, tiers, forward))
            self.move_known()
            return None
        assert used is not None, "kernels of a CPU return the length of a payload"
        moved = False
        try:
            moved = self._move(entry, stage, used, tiers, forward)
        finally:
            if not moved:
                entry.free()
                self._ledger.add(entry.account, -saved, 0, 0)
        return None if moved else used

    def move_known(self) -> None:
        """Move the payloads whose lengths have come to the host."""
        place = self._place
        while self._waiting:
            with self._place.late_lock:
                if not self._waiting or not self._waiting[0][1].ready():
                    return
                weak, length, tiers, forward = self._waiting.popleft()
                (used,) = self._lengths.take(length, torch.int64)
                entry = weak()
                stage = None if entry is None else entry.room
                if entry is None or not isinstance(stage, Slot):
                    continue
                with place.device.on(length.stream):  # in the order of the encoding, and of the stage's allocator
                    if not self._move(entry, stage, used, tiers, forward):
                        self._move(entry, stage, used, ("device",), forward)
                if forward.ended and place in forward.runs:  # no later call flushes the run
                    place.engine.flush(forward.runs[place])

    def close(self, stack: ExitStack) -> None:
        """Forget the payloads that wait for their lengths. `stack` returns the memory of these at its end."""
        with self._place.late_lock:
            waiting = [length for _, length, _, _ in self._waiting]
            self._waiting.clear()
        stack.callback(self._lengths.close, waiting)

    def _move(self, entry: Payload, stage: Slot, used: int, tiers: Sequence[str], forward: ForwardPass) -> bool:
        """Move the `used` bytes of a stage to the first tier that has room. Returns False where no tier has."""
        place, account, nbytes = self._place, entry.account, min(_roomy(used), stage.nbytes)
        room: Any = place.find(tiers, nbytes, account, forward.runs)
        if room.__class__ is Berth:  # no call, after which an interrupt (Ctrl-C) would lose the berth
            last = Finalizer(room.engine.drop, room)
            try:
                place.device.copy(room.memory, stage.memory[:nbytes], place.device.current())
                room.memory[used:].zero_()  # some tiers compare all bytes
            except BaseException:
                room.engine.cancel(room)
                raise
            entry.last = last
            room.engine.depart(room)
            self._ledger.add(account, 0, used, 0)
        elif room is not None:
            try:
                room.written = place.device.copy(room.memory, stage.memory[:nbytes], place.device.current())
            except BaseException:
                room.tier.free(room)
                raise
            entry.last = None
            entry.last = self._ledger.hold(account, 0, used, room.nbytes)
        else:
            return False
        entry.room = room
        stage.tier.free(stage)
        return True


def _roomy(nbytes: int) -> int:
    """Round up by at most a sixteenth, so that few sizes occur and pools find free buffers of a size."""
    grain = max(ALIGN, 1 << max(0, nbytes.bit_length() - 5))
    return round_up(nbytes, grain)


TIMED_STEPS = 8  # steps with timed copies after a change of their order; also the interval of later ones

E = TypeVar("E", bound=Payload)


class Store:
    """Store that encodes, places, fetches and decodes payloads, and accounts for them. Thread-safe."""

    def __init__(
        self,
        options: StoreOptions,
        ledger: Ledger | None = None,
        sampler: PayloadSampler | None = None,
        gauge: Gauge | None = None,
    ) -> None:
        self.options = options
        self.ledger = ledger or Ledger()
        self.unproved: Later = []  # payloads that backward read before the device had compared them
        self.trace = options.trace
        self.observers = StoreObservers(verify=options.verify, trace=options.trace, gauge=gauge, sampler=sampler)
        self.alone: str | None = None  # the one site that is lossy while all other sites must be exact
        self._entries: list[ref[Any]] = []
        self._places: dict[torch.device, TierSet] = {}
        self._late: dict[TierSet, VariablePayloads] = {}
        self._left: list[TierSet] = []  # closed by `close`, although graphs may still hold their payloads
        self._lock = Lock()
        self._closed = False
        self.steps = 0  # that have begun, those before a loaded state included
        self._started_ns = 0  # start of the current step
        self.step_ns = 0  # duration of the last step
        self._forward = ForwardPass()  # the last one that began
        self._timed, self._timed_until = True, TIMED_STEPS  # whether copies are timed, and up to which step all are
        self._overrun_ms = 0.0  # of the last step with timed copies

    def open(self, device: torch.device | None, tiers: Iterable[str] = (), codecs: Iterable[Codec] = ()) -> None:
        """Open tiers now, and look for the packages of codecs, so that what is missing fails now.

        Parameters
        ----------
        device : compute device; None where it is unknown: a disk tier that needs a GPU is then left out

        Raises
        ------
        ConfigError : the disk tier's folder is missing or cannot be written
        KernelUnavailable : a codec needs a package that is not installed
        """
        for codec in codecs:
            codec.require()
        if device is not None:
            self.place(device).tier("device")
        disk = self.options.tiers.get("disk")
        if device is None and isinstance(disk, Disk) and disk.gpu_direct:
            return
        for tier in sorted(set(tiers) - {"device", "host"}):
            self.place(device or torch.device("cpu")).tier(tier)

    def route(self, account: Account, src: torch.Tensor, codec: Codec, tiers: Sequence[str]) -> Route:
        """Return the route of a tensor through `codec` into the first of `tiers` with room; `account` keeps it.

        Parameters
        ----------
        src : Tensor, any dtype that `codec` accepts
        tiers : names of tiers, first choice first
        """
        route: Route | None = account.route
        if route is None or not route.fits(src, codec, tiers):
            account.precedent = None  # it belongs to the old route
            route = account.route = Route(src, codec, tiers, self.place(src.device))
        return route

    def put(self, entry: E, src: torch.Tensor, route: Route, saved: int, forward: ForwardPass) -> ref[E] | None:
        """Encode `src` into the first tier of its route that has room, where `entry` holds the payload.

        Parameters
        ----------
        entry : an empty payload, whose account books the bytes
        src : Tensor, dense strides
        route : of `src`
        saved : bytes that plain autograd would hold in place of the payload
        forward : the pass that the payload belongs to

        Returns
        -------
        ref : to `entry`; the caller holds it until it calls `remember`. None when no tier has room

        Raises
        ------
        CapacityError : no tier has room and the store is strict

        Notes
        -----
        Stream: current. On return `src` has been read in stream order and may change. The host never waits for the
        device; it waits for the disk when more than a window of bytes is queued for writing.
        """
        account = entry.account
        bound = route.bound
        ledger = self.ledger
        if ledger.gone:
            ledger.settle()  # so that the pool can reuse the buffers of payloads that died
        key = (entry.key or self._next_key(account)) if route.keyed else 0
        observers = self.observers
        if observers.are_active or (observers.samples and not route.codec.lossless):
            bound = observers.around(bound, route.codec, account, route.place)
        entry.store = self
        entry.codec = route.codec
        entry.bound = bound
        entry.key = key
        if route.pool is None:
            put = self._put_in_tier if bound.exact else self._put_variable
            return ref(entry) if put(entry, src, route, saved, forward) else None
        nbytes = bound.nbytes
        claim = Claim(entry, ledger.release)  # before the memory, which an interrupt would otherwise leak
        claim.booking = booking = [account, 0, 0]
        entry.last = claim
        claim.memory, claim.idle = route.pool.take(nbytes)
        memory = claim.memory
        try:
            bound.encode(src, memory, key)
            ledger.add(account, saved, nbytes, nbytes, booking=booking)
        except BaseException:
            ledger.release(claim)  # now: a cycle of entry and error would keep the claim until the collector runs
            raise
        entry.room = memory
        return claim

    def get(self, entry: Payload, out: torch.Tensor) -> None:
        """Decode a payload into `out`. Repeatable, and safe from any thread.

        Raises
        ------
        TransferError, PayloadError : the bytes cannot be read, or differ from what was written
        StateError : the store was closed
        """
        room = entry.room
        if isinstance(room, torch.Tensor):
            entry.bound.decode(room, out, entry.key)
            self.ledger.touch_peak(entry.account, out.nbytes)
            return
        place = None if entry.bound.exact else self._places.get(out.device)
        if place is not None and not place.device.on_host:
            with place.late_lock:  # or another thread moves the payload and frees the slot meanwhile
                room = entry.room
                if isinstance(room, Slot):
                    if room.written is not DONE:
                        room.written.wait_on(place.device.current())
                    self._decode(entry, room, out)
                    return
        elif isinstance(room, Slot):
            self._decode(entry, room, out)
            return
        if not isinstance(room, Berth):
            raise StateError("the store was closed before backward read this tensor. Close it after the last backward.")
        memory = room.engine.arrive(room)
        try:
            entry.bound.decode(memory, out, entry.key)
            self.ledger.touch_peak(entry.account, out.nbytes)
        finally:
            room.engine.leave(room)

    def borrow(self, entry: Payload, dtype: torch.dtype, *, for_good: bool = False) -> torch.Tensor | None:
        """Return a payload as the memory of a 1-d tensor, which its holder may change. For None, call `get`.

        for_good : whether the memory goes with the tensor: the next reader fetches the payload anew

        Raises
        ------
        TransferError, PayloadError, StateError : as for `get`
        """
        berth = entry.room
        if not isinstance(berth, Berth) or not entry.bound.as_is:
            return None
        tensor = berth.engine.lend(berth, dtype, for_good=for_good)
        if tensor is not None and self.trace is not None:
            place = self.place(tensor.device)
            now = place.device.mark(place.device.current())
            self.observers.note_backward(place, now, now)
        return tensor

    def _decode(self, entry: Payload, slot: Slot, out: torch.Tensor) -> None:
        memory = slot.buffer
        entry.bound.decode(slot.memory if memory is None else memory, out, entry.key)
        if slot.place is not None:
            slot.tier.used(slot)
        self.ledger.touch_peak(entry.account, out.nbytes)

    def resume(self, steps: int) -> None:
        """Continue counting from this number of steps."""
        self.steps = steps

    def begin(self, device: torch.device) -> ForwardPass:
        """Begin a forward pass on `device`, which `put` receives with each of its payloads."""
        self._forward = forward = ForwardPass()
        forward.place = place = self.place(device) if self.options.trace else self._places.get(device)
        if place is not None:
            forward.mark = place.device.mark(place.device.current())
        return forward

    def turn(self, forward: ForwardPass) -> None:
        """Mark the end of forward, because backward begins, inside of the context or after it."""
        if forward.mark is not None and forward.place is not None and forward.span is None:
            device = forward.place.device
            forward.span = Between(forward.mark, device.mark(device.current()))

    def end(self, forward: ForwardPass) -> None:
        """End the forward pass: send the parcels that wait for more payloads."""
        forward.ended = True
        for place, run in forward.runs.items():
            place.engine.flush(run)
        self.turn(forward)
        if self.trace is not None and forward.mark is not None and forward.place is not None:
            device = forward.place.device
            forward.place.engine.note("forward", Between(forward.mark, device.mark(device.current())), [])

    def start(self) -> None:
        """Begin a step: reset the last step's figures, and return memory that it did not need.

        Raises
        ------
        AccuracyError : the last sampled payloads lost more than is allowed; no step has begun
        MutationError : backward has read a payload that differed from its saved tensor; no step has begun
        """
        self._prove()
        self.observers.start(self.steps + 1)
        now = perf_counter_ns()
        self.step_ns, self._started_ns = now - (self._started_ns or now), now
        self.steps += 1
        self.poll()
        if self._timed:
            self._overrun_ms = self._overran_ms()
        self._timed = self._times()
        self.ledger.start(timed=self._timed)
        for place in list(self._places.values()):
            place.start(self.steps, timed=self._timed)

    def _times(self) -> bool:
        """Return whether the copies of this step are timed: on an accelerator that costs the host several calls each.

        They are until the order of payloads has been the same for some steps, then in every few steps, and for a trace.
        """
        places = list(self._places.values())
        if any(place.engine.differed for place in places):
            self._timed_until = self.steps + TIMED_STEPS
        free = all(place.device.on_host for place in places)
        return free or self.trace is not None or self.steps <= self._timed_until or self.steps % TIMED_STEPS == 0

    def _overran_ms(self) -> float:
        """Return the time from the end of the last forward to that of its last copy out."""
        span, place = self._forward.span, self._forward.place
        found = span.span() if span is not None and place is not None and span.ready() else None
        return max(0, place.engine.left_ns() - found[1]) / 1e6 if found and place is not None else 0.0

    def _prove(self, *, wait: bool = False) -> None:
        """Raise the error of a payload that differs, where backward read it before the device had compared it."""
        for _ in range(len(self.unproved)):
            comparison, error = self.unproved.pop(0)
            if wait:
                comparison.wait()
            comparison.refuse(error)

    @contextmanager
    def lossy_only_at(self, site: str) -> Iterator[None]:
        """Make the payloads of `site` alone lossy, and the payloads of all other sites exact, inside the context."""
        self.alone = site
        try:
            yield
        finally:
            self.alone = None

    def remember(self, entries: Iterable[ref[Any]]) -> None:
        """Register entries, so that `close` can free those that are still alive."""
        with self._lock:
            self._entries = [weak for weak in (*self._entries, *entries) if weak() is not None]

    def poll(self) -> None:
        """Free device memory whose bytes have arrived in a tier, and memory that payloads turned out not to need."""
        for place in [*self._places.values(), *self._left]:
            place.engine.poll()
            self._late[place].move_known()

    def circumstances(self, min_nbytes: int) -> Circumstances:
        """Return the conditions that the figures of the current step depend on."""
        first = not self.step_ns
        places, options, span = list(self._places.values()), self.options, self._forward.span
        begin, end = (span.span() if span is not None and span.ready() else None) or (0, 0)
        window = max((place.engine.window_nbytes for place in places), default=0)
        bounds = [place.engine.bound_nbytes(run) for place, run in self._forward.runs.items()]
        return Circumstances(
            min_nbytes=min_nbytes,
            on_host=any(place.device.on_host for place in places) if places else not torch.accelerator.is_available(),
            step_ms=(perf_counter_ns() - self._started_ns if first else self.step_ns) / 1e6,
            first_step=first,
            forward_ms=(end - begin) / 1e6,
            overrun_ms=self._overran_ms() if self._timed else self._overrun_ms,
            window_nbytes=window,
            bound_nbytes=window if first else min(bounds, default=window),
            keeps_when_full=options.window.when_full == "keep",
            host_nbytes=_budget_of(options, "host"),
            disk_nbytes=_budget_of(options, "disk"),
            order=next((found for place in places if (found := place.engine.differed)), ""),
        )

    def events(self) -> Trace | None:
        """Return the trace, with all events that are known by now."""
        self.observers.end_backward()
        self.poll()
        self.observers.read()
        return self.trace

    def close(self) -> None:
        """Return all memory and files. Payloads that graphs still hold can no longer be read."""
        with self._lock:
            self._closed = True
            places, self._places = self._places, {}
            self._left += places.values()
            self.ledger.budget.close()
        for weak in self._entries:
            entry = weak()
            if entry is not None:
                entry.free()
        for account in self.ledger.accounts():
            account.route = account.precedent = None
        with ExitStack() as stack:
            stack.callback(self._prove, wait=True)
            stack.callback(self.observers.close)
            for place in places.values():
                self._late[place].close(stack)
                stack.callback(place.close)

    def place(self, device: torch.device) -> TierSet:
        """Return the tiers of a compute device."""
        with self._lock:
            if self._closed:
                raise StateError("this store is closed. Make a new ActivationStore.")
            place = self._places.get(device)
            if place is None:
                if self.trace is not None:
                    self.trace.begin(str(device))
                place = TierSet(self.options.open_device(device), self.options, self.ledger, self.trace)
                self._late[place] = VariablePayloads(place, self.ledger)
                self._places[device] = place
                self.ledger.budget.add(place.engine)
            return place

    def _next_key(self, account: Account) -> int:
        """Return a key of 63 bits, a function of the seed, the step, the site and the number of payloads there."""
        account.drawn += 1
        text = f"{self.options.seed}/{self.steps}/{account.site}/{account.drawn}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def _put_in_tier(self, entry: Payload, src: torch.Tensor, route: Route, saved: int, forward: ForwardPass) -> bool:
        """Encode into a slot of the device, or into a berth for another tier. Returns False when none has room."""
        account, bound = entry.account, entry.bound
        room: Any = route.place.find(route.tiers, bound.nbytes, account, forward.runs)
        if room.__class__ is Berth:  # no call, after which an interrupt (Ctrl-C) would lose the berth
            entry.last = Finalizer(room.engine.drop, room)
            try:
                bound.encode(src, room.memory, entry.key)
            except BaseException:
                room.engine.cancel(room)
                raise
            room.engine.depart(room)
            self.ledger.add(account, saved, bound.nbytes, 0)
        elif room is not None:
            try:
                bound.encode(src, room.memory, entry.key)
            except BaseException:
                room.tier.free(room)
                raise
            entry.last = self.ledger.hold(account, saved, bound.nbytes, room.nbytes)
        else:
            self._refuse(bound.nbytes, route.tiers)
            return False
        entry.room = room
        return True

    def _refuse(self, nbytes: int, tiers: Sequence[str]) -> None:
        if self.options.strict:
            raise CapacityError(
                f"no room for {format_nbytes(nbytes)} in {' > '.join(tiers)}. Raise the budget, add a tier "
                "to the ladder, or use strict=False to keep what does not fit.",
                nbytes=nbytes,
                tiers=tuple(tiers),
            )

    def _put_variable(self, entry: Payload, src: torch.Tensor, route: Route, saved: int, forward: ForwardPass) -> bool:
        """Encode a payload of variable size. Returns False when no tier has room."""
        nbytes = self._late[route.place].put(entry, src, route, saved, forward)
        if nbytes is not None:
            self._refuse(nbytes, route.tiers)
        return nbytes is None


def _budget_of(options: StoreOptions, tier: str) -> int | None:
    given = options.tiers.get(tier)
    return None if given is None else given.budget_nbytes
