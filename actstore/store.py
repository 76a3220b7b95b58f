"""Puts encoded tensors into tiers and gets them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from threading import Lock
from typing import Any
from weakref import ref

import torch

from actstore.codecs import Codec
from actstore.codecs.base import Bound
from actstore.errors import CapacityError, StateError
from actstore.kernels.base import ALIGN
from actstore.ledger import Account, Ledger
from actstore.tiers import Slot
from actstore.tierset import StoreOptions, TierSet
from actstore.transfer import Length
from actstore.units import format_nbytes


class Entry:
    """One payload, or none yet. It frees its slot when it dies."""

    __slots__ = ("__weakref__", "account", "bound", "codec", "key", "slot", "store")

    store: Store
    account: Account
    codec: Codec
    bound: Bound
    key: int
    slot: Slot | None

    def free(self) -> None:
        """Give the slot back. What is asked of the entry later raises StateError."""
        slot = self.slot
        if slot is not None:
            self.slot = None
            slot.tier.free(slot)
            if slot.tier.on_device:
                self.store.ledger.release(self.account, slot.nbytes, 0)
            else:
                self.store.ledger.release(self.account, 0, slot.nbytes)


class _Route:
    """Where the last tensor of a site went: the next one of its kind goes there without a search."""

    __slots__ = ("bound", "codec", "device", "dtype", "keyed", "numel", "place", "shape", "tier", "tiers")

    def __init__(self, src: torch.Tensor, codec: Codec, tiers: Sequence[str], place: TierSet) -> None:
        self.codec = codec
        self.tiers = tiers
        self.numel = src.numel()
        self.dtype = src.dtype
        self.device = src.device
        self.keyed = codec.keyed
        self.shape = (src.shape, src.stride()) if codec.shaped else None
        self.bound = codec.bind(src)
        self.place = place
        self.tier = place.tier(tiers[0])

    def fits(self, src: torch.Tensor, codec: Codec, tiers: Sequence[str]) -> bool:
        return (
            self.codec is codec
            and self.tiers is tiers
            and self.numel == src.numel()
            and self.dtype is src.dtype
            and self.device == src.device
            and (self.shape is None or self.shape == (src.shape, src.stride()))
        )


class Store:
    """Encodes, places, fetches and decodes payloads, and keeps account of them. Thread-safe."""

    def __init__(self, options: StoreOptions) -> None:
        self.options = options
        self.ledger = Ledger()
        self._entries: list[ref[Any]] = []
        self._places: dict[torch.device, TierSet] = {}
        self._lock = Lock()
        self._closed = False
        self._steps = 0

    def open(self, device: torch.device, tier: str) -> None:
        """Open a tier now, so that what is wrong with it is said now.

        Raises
        ------
        ConfigError : the disk tier's folder is missing or cannot be written
        """
        self._place(device).tier(tier)

    def put(self, entry: Entry, src: torch.Tensor, codec: Codec, tiers: Sequence[str], saved: int) -> bool:
        """Encode `src` into the first tier that has room, and give the slot to `entry`.

        Parameters
        ----------
        entry : an empty one, with its account, where the bytes are booked
        src : Tensor, dense strides, any dtype that `codec` accepts
        tiers : names of tiers, first choice first
        saved : bytes that plain autograd would hold in place of the payload

        Returns
        -------
        bool : False when no tier has room

        Raises
        ------
        CapacityError : no tier has room and the store is strict

        Notes
        -----
        Stream: current. On return `src` has been read in stream order and may change. The host never waits for the
        device; it waits for the disk when more than a window of bytes is still to be written.
        """
        account = entry.account
        route: _Route | None = account.route
        if route is None or not route.fits(src, codec, tiers):
            route = account.route = _Route(src, codec, tiers, self._place(src.device))
        bound = route.bound
        key = self._next_key(account) if route.keyed else 0
        if not bound.exact:
            return self._put_variable(entry, src, codec, route, key, saved)
        tier = route.tier
        slot = tier.reserve(bound.nbytes)
        if slot is None:
            slot = route.place.reserve(tiers[1:], bound.nbytes)
            if slot is None:
                self._refuse(bound.nbytes, tiers)
                return False
        else:
            slot.tier = tier
        if slot.tier.on_device:
            try:
                used = bound.encode(src, slot.memory, key)
            except BaseException:
                slot.tier.free(slot)
                raise
            self.ledger.add(account, saved, used, slot.nbytes)
        else:
            self._encode_and_offload(src, bound, route.place, slot, account, key, saved)
        entry.store, entry.codec, entry.bound, entry.key, entry.slot = self, codec, bound, key, slot
        return True

    def get(self, entry: Entry, out: torch.Tensor) -> None:
        """Decode a payload into `out`. Repeatable, and safe from any thread.

        Raises
        ------
        TransferError, PayloadError : the bytes cannot be read or are not what was written
        StateError : the store was closed
        """
        slot = entry.slot
        if slot is None:
            raise StateError("the store was closed before backward read this tensor; close it after the last backward")
        tier = slot.tier
        if tier.on_device:
            entry.bound.decode(slot.memory, out, entry.key)
            self.ledger.touch_peak(entry.account, out.nbytes)
            return
        stage = self._place(out.device).stage(slot.nbytes)
        try:
            tier.read(slot, stage.memory)
            entry.bound.decode(stage.memory, out, entry.key)
            self.ledger.touch_peak(entry.account, out.nbytes + slot.nbytes)
        finally:
            stage.tier.free(stage)

    def start(self) -> None:
        """Begin a step: forget the last one's figures, return memory that it did not need."""
        self._steps += 1
        self.poll()
        self.ledger.start()
        for place in list(self._places.values()):
            place.trim()

    def remember(self, entries: Iterable[ref[Any]]) -> None:
        """Know these entries, so that `close` can free those that are still alive."""
        with self._lock:
            self._entries = [weak for weak in (*self._entries, *entries) if weak() is not None]

    def poll(self) -> None:
        """Let go of device memory whose bytes have arrived elsewhere, or that payloads turned out not to need."""
        for place in list(self._places.values()):
            place.transfer.poll()
            self._move_known(place)

    def close(self) -> None:
        """Return all memory and files. What graphs still hold can no longer be read."""
        with self._lock:
            self._closed = True
            places, self._places = self._places, {}
        for weak in self._entries:
            entry = weak()
            if entry is not None:
                entry.free()
        for account in self.ledger.accounts():
            account.route = None
        with ExitStack() as stack:
            for place in places.values():
                stack.callback(place.close)

    def _place(self, device: torch.device) -> TierSet:
        with self._lock:
            if self._closed:
                raise StateError("this store is closed; make a new ActivationStore")
            place = self._places.get(device)
            if place is None:
                place = self._places[device] = TierSet(device, self.options)
            return place

    def _next_key(self, account: Account) -> int:
        """A key of 63 bits: the same for the same seed, step, site and number of payloads there."""
        account.drawn += 1
        text = f"{self.options.seed}/{self._steps}/{account.site}/{account.drawn}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def _refuse(self, nbytes: int, tiers: Sequence[str]) -> None:
        if self.options.strict:
            raise CapacityError(
                f"no room for {format_nbytes(nbytes)} in {' > '.join(tiers)}; raise the budget, add a tier "
                "to the ladder, or use strict=False to keep what does not fit",
                nbytes=nbytes,
                tiers=tuple(tiers),
            )

    def _encode_and_offload(
        self, src: torch.Tensor, bound: Bound, place: TierSet, slot: Slot, account: Account, key: int, saved: int
    ) -> None:
        try:
            stage = place.stage(bound.nbytes)
        except BaseException:
            slot.tier.free(slot)
            raise
        booked = False
        try:
            used = bound.encode(src, stage.memory, key)
            self.ledger.add(account, saved, used, stage.nbytes)
            booked = True
            self._offload(place, stage, slot, account)
        except BaseException:
            if booked:
                self.ledger.add(account, -saved, -used, -stage.nbytes)
            stage.tier.free(stage)
            slot.tier.free(slot)
            raise

    def _offload(self, place: TierSet, stage: Slot, slot: Slot, account: Account) -> None:
        """Start to move what `stage` holds to `slot`; the stage is free when its bytes have left."""

        def landed(_: torch.Tensor) -> None:
            self.ledger.add(account, 0, 0, -stage.nbytes, slot.nbytes)
            stage.tier.free(stage)

        place.transfer.offload(slot.tier, slot, stage.memory[: slot.nbytes], landed)

    # -- payloads of variable size ------------------------------------------------------------------------------------

    def _put_variable(self, entry: Entry, src: torch.Tensor, codec: Codec, route: _Route, key: int, saved: int) -> bool:
        """Encode into room for the longest payload, and move what there is to room for just that.

        On a CPU at once. Elsewhere the payload waits on the device until its length has come to the host: nobody waits
        for it, `poll` and later payloads look.
        """
        place, tiers, account = route.place, route.tiers, entry.account
        stage = place.stage(route.bound.nbytes)
        try:
            used = route.bound.encode(src, stage.memory, key)
            late = None if route.device.type == "cpu" else Length(stage.memory)
        except BaseException:
            stage.tier.free(stage)
            raise
        entry.store, entry.codec, entry.bound, entry.key, entry.slot = self, codec, route.bound, key, stage
        self.ledger.add(account, saved, 0, stage.nbytes)
        if late is not None:
            with place.late_lock:
                place.late.append((ref(entry), late, tiers))
            self._move_known(place)
            return True
        moved = False
        try:
            moved = self._move(entry, place, stage, used, tiers)
        finally:
            if not moved:
                entry.slot = None
                stage.tier.free(stage)
                self.ledger.add(account, -saved, 0, -stage.nbytes)
        if not moved:
            self._refuse(used, tiers)
        return moved

    def _move_known(self, place: TierSet) -> None:
        """Move the payloads whose lengths have come to the host."""
        while place.late:
            with place.late_lock:
                if not place.late or not place.late[0][1].ready():
                    return
                weak, length, tiers = place.late.popleft()
                entry = weak()
                stage = entry.slot if entry is not None else None
                if entry is None or stage is None:
                    continue
                with length.stream:  # in the order of the encoding, and of the allocator that the stage came from
                    if not self._move(entry, place, stage, length.nbytes, tiers):
                        self._move(entry, place, stage, length.nbytes, ("device",))

    def _move(self, entry: Entry, place: TierSet, stage: Slot, used: int, tiers: Sequence[str]) -> bool:
        """Move the `used` bytes of a stage to the first tier that has room; False where none has."""
        room = min(_roomy(used), stage.nbytes)
        slot = place.reserve(tiers, room)
        if slot is None:
            return False
        try:
            if slot.tier.on_device:
                slot.memory.copy_(stage.memory[:room], non_blocking=True)
                self.ledger.add(entry.account, 0, used, slot.nbytes - stage.nbytes)
                entry.slot = slot
                stage.tier.free(stage)
            else:
                self._offload(place, stage, slot, entry.account)
                self.ledger.add(entry.account, 0, used, 0)
                entry.slot = slot
        except BaseException:
            slot.tier.free(slot)
            raise
        return True


def _roomy(nbytes: int) -> int:
    """A size of at most a sixteenth more that few lengths differ in, so that pools find buffers that they know."""
    grain = max(ALIGN, 1 << max(0, nbytes.bit_length() - 5))
    return -(-nbytes // grain) * grain
