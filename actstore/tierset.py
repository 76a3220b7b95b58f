"""The tiers of one compute device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from threading import Lock
from typing import Any
from weakref import ref

import torch

from actstore.errors import CapacityError
from actstore.tiers import DeviceTier, DiskTier, HostMemoryTier, HostTier, Limited, Slot, Tier
from actstore.transfer import Length, Transfer
from actstore.units import format_nbytes


@dataclass(frozen=True)
class StoreOptions:
    """Where tiers live and how much they may hold; budgets in bytes, None for no limit."""

    host_budget_nbytes: int | None = None
    disk_budget_nbytes: int | None = None
    disk_path: str | PathLike[str] | None = None
    strict: bool = False
    seed: int = 0  # of the random bits that codecs round with


class TierSet:
    """The tiers of one compute device, opened when first used."""

    def __init__(self, device: torch.device, options: StoreOptions) -> None:
        self._options = options
        self._device = device
        self._open: dict[str, Tier] = {}
        self._lock = Lock()
        self.transfer = Transfer(device)
        self.late: deque[tuple[ref[Any], Length, Sequence[str]]] = deque()  # payloads whose lengths are on their way
        self.late_lock = Lock()

    def tier(self, name: str) -> Tier:
        with self._lock:
            tier = self._open.get(name)
            if tier is None:
                tier = self._open[name] = self._make(name)
            return tier

    def reserve(self, names: Sequence[str], nbytes: int) -> Slot | None:
        """Room in the first tier that has some, or None."""
        for name in names:
            tier = self.tier(name)
            slot = tier.reserve(nbytes)
            if slot is not None:
                slot.tier = tier
                return slot
        return None

    def stage(self, nbytes: int) -> Slot:
        """Memory of the compute device for a payload on its way."""
        slot = self.reserve(("device",), nbytes)
        if slot is None:
            raise CapacityError(f"no room for {format_nbytes(nbytes)} on the compute device", nbytes=nbytes)
        return slot

    def trim(self) -> None:
        for tier in list(self._open.values()):
            tier.trim()

    def close(self) -> None:
        with ExitStack() as stack:  # all are closed, also when one fails
            for tier in self._open.values():
                stack.callback(tier.close)
            self.transfer.drain()

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
