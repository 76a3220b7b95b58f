"""Puts encoded tensors into tiers and gets them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from threading import Lock
from typing import Any
from weakref import ref

import torch

from actstore.codecs import Codec
from actstore.codecs.base import Bound
from actstore.errors import CapacityError, StateError
from actstore.ledger import Account, Ledger
from actstore.tiers import DeviceTier, DiskTier, HostMemoryTier, HostTier, Limited, Slot, Tier
from actstore.transfer import Transfer
from actstore.units import format_nbytes


@dataclass(frozen=True)
class StoreOptions:
    """Where tiers live and how much they may hold; budgets in bytes, None for no limit."""

    host_budget_nbytes: int | None = None
    disk_budget_nbytes: int | None = None
    disk_path: str | PathLike[str] | None = None
    strict: bool = False


class Entry:
    """One payload, or none yet. It frees its slot when it dies."""

    __slots__ = ("__weakref__", "account", "bound", "codec", "slot", "store", "tier")

    store: Store
    account: Account
    codec: Codec
    bound: Bound
    tier: Tier
    slot: Slot | None

    def free(self) -> None:
        """Give the slot back. What is asked of the entry later raises StateError."""
        slot = self.slot
        if slot is not None:
            self.slot = None
            self.tier.free(slot)
            if self.tier.on_device:
                self.store.ledger.release(self.account, slot.nbytes, 0)
            else:
                self.store.ledger.release(self.account, 0, slot.nbytes)


class _Route:
    """Where the last tensor of a site went: the next one of its kind goes there without a search."""

    __slots__ = ("bound", "codec", "device", "dtype", "numel", "place", "tier", "tiers")

    def __init__(self, src: torch.Tensor, codec: Codec, tiers: Sequence[str], place: _Place) -> None:
        self.codec = codec
        self.tiers = tiers
        self.numel = src.numel()
        self.dtype = src.dtype
        self.device = src.device
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
        )


class _Place:
    """The tiers of one compute device, opened when first used."""

    def __init__(self, device: torch.device, options: StoreOptions) -> None:
        self._options = options
        self._device = device
        self._open: dict[str, Tier] = {}
        self._lock = Lock()
        self.transfer = Transfer(device)

    def tier(self, name: str) -> Tier:
        with self._lock:
            tier = self._open.get(name)
            if tier is None:
                tier = self._open[name] = self._make(name)
            return tier

    def _make(self, name: str) -> Tier:
        options, on_cpu = self._options, self._device.type == "cpu"
        budget = None
        tier: Tier
        if name == "device":
            tier = DeviceTier(self._device)
        elif name == "host":
            tier = HostMemoryTier(self._device) if on_cpu else HostTier(self._device)
            budget = options.host_budget_nbytes
        else:
            tier = DiskTier(options.disk_path, None if on_cpu else HostTier(self._device))
            budget = options.disk_budget_nbytes
        return tier if budget is None else Limited(tier, budget)

    def trim(self) -> None:
        for tier in list(self._open.values()):
            tier.trim()

    def close(self) -> None:
        with ExitStack() as stack:  # all are closed, also when one fails
            for tier in self._open.values():
                stack.callback(tier.close)
            self.transfer.drain()


class Store:
    """Encodes, places, fetches and decodes payloads, and keeps account of them. Thread-safe."""

    def __init__(self, options: StoreOptions) -> None:
        self.options = options
        self.ledger = Ledger()
        self._entries: list[ref[Any]] = []
        self._places: dict[torch.device, _Place] = {}
        self._lock = Lock()
        self._closed = False

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
        tier, bound = route.tier, route.bound
        slot = tier.reserve(bound.nbytes)
        for name in tiers[1:] if slot is None else ():
            tier = route.place.tier(name)
            slot = tier.reserve(bound.nbytes)
            if slot is not None:
                break
        if slot is None:
            if self.options.strict:
                raise CapacityError(
                    f"no room for {format_nbytes(bound.nbytes)} in {' > '.join(tiers)}; raise the budget, add a tier "
                    "to the ladder, or use strict=False to keep what does not fit",
                    nbytes=bound.nbytes,
                    tiers=tuple(tiers),
                )
            return False
        if tier.on_device:
            try:
                used = bound.encode(src, slot.memory, 0)
            except BaseException:
                tier.free(slot)
                raise
            self.ledger.add(account, saved, used, slot.nbytes)
        else:
            self._encode_and_offload(src, bound, route.place, tier, slot, account, saved)
        entry.store, entry.codec, entry.bound, entry.tier, entry.slot = self, codec, bound, tier, slot
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
        if entry.tier.on_device:
            entry.bound.decode(slot.memory, out, 0)
            self.ledger.touch_peak(entry.account, out.nbytes)
            return
        device_tier = self._place(out.device).tier("device")
        stage = _memory(device_tier, slot.nbytes)
        try:
            entry.tier.read(slot, stage.memory)
            entry.bound.decode(stage.memory, out, 0)
            self.ledger.touch_peak(entry.account, out.nbytes + slot.nbytes)
        finally:
            device_tier.free(stage)

    def start(self) -> None:
        """Begin a step: forget the last one's figures, return memory that it did not need."""
        self.poll()
        self.ledger.start()
        for place in list(self._places.values()):
            place.trim()

    def remember(self, entries: Iterable[ref[Any]]) -> None:
        """Know these entries, so that `close` can free those that are still alive."""
        with self._lock:
            self._entries = [weak for weak in (*self._entries, *entries) if weak() is not None]

    def poll(self) -> None:
        """Let go of device memory whose bytes have arrived elsewhere."""
        for place in list(self._places.values()):
            place.transfer.poll()

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

    def _place(self, device: torch.device) -> _Place:
        with self._lock:
            if self._closed:
                raise StateError("this store is closed; make a new ActivationStore")
            place = self._places.get(device)
            if place is None:
                place = self._places[device] = _Place(device, self.options)
            return place

    def _encode_and_offload(
        self, src: torch.Tensor, bound: Bound, place: _Place, tier: Tier, slot: Slot, account: Account, saved: int
    ) -> None:
        device_tier = place.tier("device")
        nbytes = slot.nbytes
        try:
            stage = _memory(device_tier, nbytes)
        except BaseException:
            tier.free(slot)
            raise

        def landed(_: torch.Tensor) -> None:
            self.ledger.add(account, 0, 0, -nbytes, nbytes)
            device_tier.free(stage)

        booked = False
        try:
            used = bound.encode(src, stage.memory, 0)
            self.ledger.add(account, saved, used, nbytes)
            booked = True
            place.transfer.offload(tier, slot, stage.memory, landed)
        except BaseException:
            if booked:
                self.ledger.add(account, -saved, -used, -nbytes)
            device_tier.free(stage)
            tier.free(slot)
            raise


def _memory(device_tier: Tier, nbytes: int) -> Slot:
    """Memory of the compute device for a payload on its way."""
    slot = device_tier.reserve(nbytes)
    if slot is None:
        raise CapacityError(f"no room for {format_nbytes(nbytes)} on the compute device", nbytes=nbytes)
    return slot
