"""The tiers of one compute device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock

import torch

from actstore import devices
from actstore.base.ledger import Account, Ledger
from actstore.base.note import Note
from actstore.base.units import format_nbytes
from actstore.devices import Device
from actstore.errors import CapacityError
from actstore.tiers import BufferPool, DeviceTier, HostMemoryTier, Slot, Tier, Window
from actstore.tiers.options import TierOptions, open_tier
from actstore.trace import Trace
from actstore.transfer import Berth, Engine, TransferRun


def open_device(device: torch.device) -> Device:
    """Return the compute device of a `torch.device`."""
    return devices.open_device(device)  # looked up now: tests put another one in its place


@dataclass(frozen=True)
class StoreOptions:
    """Options of a store, beside its policy.

    Attributes
    ----------
    tiers : options of each tier, by its name; a tier without options has its defaults
    window : the bound on bytes that wait on the device although a tier has them, or is about to have them
    strict : whether a payload that fits in no tier is an error
    seed : seed of the random bits of lossy codecs
    trace : the record of events; None for none
    verify : whether each decode compares the payload with its checksum
    open_device : opens a compute device
    """

    tiers: Mapping[str, TierOptions] = field(default_factory=dict)
    window: Window = field(default_factory=Window)
    strict: bool = False
    seed: int = 0
    trace: Trace | None = None
    verify: bool = False
    open_device: Callable[[torch.device], Device] = open_device


class TierSet:
    """The tiers of one compute device, opened when first used, and the engine that moves payloads to them."""

    def __init__(self, device: Device, options: StoreOptions, ledger: Ledger, trace: Trace | None) -> None:
        self.device = device
        self.engine = Engine(device, ledger, options.window.limit_nbytes, trace, poison=options.verify)
        self.late_lock = Lock()  # held while a late payload moves, because that frees memory which a reader may use
        self._options = options
        self._open: dict[str, Tier] = {}
        self._lock = Lock()

    def tier(self, name: str) -> Tier:
        tier = self._open.get(name)
        if tier is None:
            with self._lock:
                tier = self._open.get(name)
                if tier is None:
                    tier = self._open[name] = open_tier(name, self.device, self._options.tiers)
        return tier

    def pool(self, name: str) -> BufferPool | None:
        """Return the buffers of payloads without a slot; None unless the tier is actstore's own and in host memory."""
        tier = self.tier(name)
        return tier.pool if type(tier) is DeviceTier or type(tier) is HostMemoryTier else None

    def reserve(self, name: str, nbytes: int) -> Slot | None:
        """Reserve a slot in a tier. Returns None when it is full."""
        tier = self.tier(name)
        slot = tier.reserve(nbytes)
        if slot is not None:
            slot.tier = tier
        return slot

    def stage(self, nbytes: int) -> Slot:
        """Reserve memory of the compute device for a payload whose length is unknown."""
        slot = self.reserve("device", nbytes)
        if slot is None:
            raise CapacityError(f"no room for {format_nbytes(nbytes)} on the compute device.", nbytes=nbytes)
        return slot

    def find(
        self, tiers: Sequence[str], nbytes: int, account: Account, runs: dict[TierSet, TransferRun[Berth]]
    ) -> Slot | Berth | None:
        """Return room on the device, or on the way to another tier; None when no tier has room.

        Parameters
        ----------
        runs : of one forward pass, by device; the engine's is begun where it is missing
        """
        when_full = self._options.window.when_full
        for name in tiers:
            tier = self.tier(name)
            if tier.on_device:
                slot = self.reserve(name, nbytes)
                if slot is not None:
                    return slot
                continue
            run = runs.get(self)
            if run is None:
                run = runs[self] = self.engine.begin()
            if when_full != "wait" and not self.engine.admits(run, tier, nbytes):
                account.note = Note(f"window of {name} full", full=(name,))
                if when_full == "keep":
                    return self.reserve("device", nbytes)
                if name != tiers[-1]:
                    continue
            berth = self.engine.board(run, tier, nbytes, account)
            if berth is not None:
                return berth
        return None

    def start(self, step: int, *, timed: bool) -> None:
        """Begin a step, with `timed` copies or without: return memory that the last step did not need."""
        self.engine.start(step, timed=timed)
        for tier in list(self._open.values()):
            tier.trim()

    def let_go(self) -> None:
        """Return idle device memory at the start of the next step, for which other decisions hold."""
        if (tier := self._open.get("device")) is not None:
            tier.trim()

    def close(self) -> None:
        with ExitStack() as stack:  # closes all, also when one fails
            stack.callback(self.engine.close)
            for tier in self._open.values():
                stack.callback(tier.close)
