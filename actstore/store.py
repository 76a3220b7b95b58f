"""Puts encoded tensors into tiers and gets them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from threading import Lock
from typing import Any
from weakref import ref

import torch

from actstore.codecs import Codec
from actstore.errors import CapacityError, StateError
from actstore.ledger import Account, Ledger
from actstore.spec import Spec
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
    """One payload. It frees its slot when the last handle to it is gone."""

    __slots__ = ("__weakref__", "account", "codec", "fresh", "nbytes", "slot", "store", "tier")

    def __init__(self, store: Store, account: Account, codec: Codec, tier: Tier, slot: Slot, nbytes: int) -> None:
        self.store = store
        self.account = account
        self.codec = codec
        self.tier = tier
        self.slot: Slot | None = slot
        self.nbytes = nbytes  # of the payload; the slot may be larger
        self.fresh: Any = None  # the last decoded copy that several views share, owned by the handles
        store.live[id(self)] = ref(self)

    def free(self) -> None:
        """Give the slot back. What is asked of the entry later raises StateError."""
        slot, self.slot = self.slot, None
        if slot is not None:
            self.tier.free(slot)
            on_device = self.tier.on_device
            self.store.ledger.release(self.account, slot.nbytes if on_device else 0, 0 if on_device else slot.nbytes)

    def __del__(self) -> None:
        self.store.live.pop(id(self), None)
        self.free()


class _Place:
    """The tiers of one compute device, opened when first used."""

    def __init__(self, device: torch.device, options: StoreOptions) -> None:
        self._options = options
        self._device = device
        self._open: dict[str, Tier] = {}
        self.transfer = Transfer(device)

    def tier(self, name: str) -> Tier:
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
        for tier in self._open.values():
            tier.trim()

    def close(self) -> None:
        self.transfer.drain()
        for tier in self._open.values():
            tier.close()


class Store:
    """Encodes, places, fetches and decodes payloads, and keeps account of them. Thread-safe."""

    def __init__(self, options: StoreOptions) -> None:
        self.options = options
        self.ledger = Ledger()
        self.live: dict[int, ref[Entry]] = {}
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

    def put(self, src: torch.Tensor, codec: Codec, tiers: Sequence[str], account: Account) -> Entry | None:
        """Encode `src` into the first tier that has room.

        Parameters
        ----------
        src : Tensor, dense strides, any dtype that `codec` accepts
        tiers : names of tiers, first choice first

        Returns
        -------
        Entry, or None when no tier has room

        Raises
        ------
        CapacityError : no tier has room and the store is strict

        Notes
        -----
        Stream: current. On return `src` has been read in stream order and may change. The host never waits for the
        device; it waits for the disk when more than a window of bytes is still to be written.
        """
        place = self._places.get(src.device) or self._place(src.device)
        size = codec.size(Spec.of(src)).nbytes
        for name in tiers:
            tier = place.tier(name)
            slot = tier.reserve(size)
            if slot is not None:
                break
        else:
            if self.options.strict:
                raise CapacityError(
                    f"no room for {format_nbytes(size)} in {' > '.join(tiers)}; raise the budget, add a tier to the "
                    "ladder, or use strict=False to keep what does not fit",
                    nbytes=size,
                    tiers=tuple(tiers),
                )
            return None
        if tier.on_device:
            return self._encode_in_place(src, codec, tier, slot, account)
        return self._encode_and_offload(src, codec, place, tier, slot, account)

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
            buffer = slot.buffer
            assert buffer is not None
            entry.codec.decode(buffer, out)
            self.ledger.touch_peak(entry.account, out.nbytes)
            return
        device_tier = self._place(out.device).tier("device")
        stage = device_tier.reserve(entry.nbytes)
        assert stage is not None
        assert stage.buffer is not None
        try:
            entry.tier.read(slot, stage.buffer)
            entry.codec.decode(stage.buffer, out)
            self.ledger.touch_peak(entry.account, out.nbytes + entry.nbytes)
        finally:
            device_tier.free(stage)

    def start(self) -> None:
        """Begin a step: forget the last one's figures, return memory that it did not need."""
        self.poll()
        self.ledger.start()
        for place in self._places.values():
            place.trim()

    def poll(self) -> None:
        """Let go of device memory whose bytes have arrived elsewhere."""
        for place in list(self._places.values()):
            place.transfer.poll()

    def close(self) -> None:
        """Return all memory and files. What graphs still hold can no longer be read."""
        with self._lock:
            self._closed = True
            places, self._places = self._places, {}
        for entry in [weak() for weak in list(self.live.values())]:
            if entry is not None:
                entry.free()
        for place in places.values():
            place.close()

    def _place(self, device: torch.device) -> _Place:
        with self._lock:
            if self._closed:
                raise StateError("this store is closed; make a new ActivationStore")
            place = self._places.get(device)
            if place is None:
                place = self._places[device] = _Place(device, self.options)
            return place

    def _encode_in_place(self, src: torch.Tensor, codec: Codec, tier: Tier, slot: Slot, account: Account) -> Entry:
        assert slot.buffer is not None
        try:
            used = codec.encode(src, slot.buffer)
        except BaseException:
            tier.free(slot)
            raise
        self.ledger.add(account, stored=used, held=slot.nbytes)
        return Entry(self, account, codec, tier, slot, used)

    def _encode_and_offload(
        self, src: torch.Tensor, codec: Codec, place: _Place, tier: Tier, slot: Slot, account: Account
    ) -> Entry:
        device_tier = place.tier("device")
        stage = device_tier.reserve(slot.nbytes)
        assert stage is not None
        assert stage.buffer is not None
        nbytes = slot.nbytes

        def landed(_: torch.Tensor) -> None:
            self.ledger.add(account, held=-nbytes, away=nbytes)
            device_tier.free(stage)

        booked = 0
        try:
            used = codec.encode(src, stage.buffer)
            self.ledger.add(account, stored=used, held=nbytes)
            booked = used
            place.transfer.offload(tier, slot, stage.buffer, landed)
        except BaseException:
            if booked:
                self.ledger.add(account, stored=-booked, held=-nbytes)
            device_tier.free(stage)
            tier.free(slot)
            raise
        return Entry(self, account, codec, tier, slot, used)
