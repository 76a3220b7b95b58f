"""The tiers of one compute device."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import ref

from actstore.base.ledger import Ledger
from actstore.base.units import format_nbytes
from actstore.devices import Device
from actstore.errors import CapacityError
from actstore.kernels.base import LENGTH_NBYTES
from actstore.tiers import BufferPool, DeviceTier, HostMemoryTier, Slot, Tier, Window
from actstore.tiers.options import TierOptions, open_tier
from actstore.trace import Trace
from actstore.transfer import Cell, Cells, Engine


@dataclass(frozen=True)
class StoreOptions:
    """Options of a store.

    Attributes
    ----------
    tiers : options of each tier, by its name; a tier without any has its defaults
    window : the bound on what waits on the device although a tier has it, or is about to
    strict : whether a payload without room is an error
    seed : of the random bits that codecs round with
    trace : what writes down events
    verify : whether every payload is checked against its checksum
    """

    tiers: Mapping[str, TierOptions] = field(default_factory=dict)
    window: Window = field(default_factory=Window)
    strict: bool = False
    seed: int = 0
    trace: Trace | None = None
    verify: bool = False


class TierSet:
    """The tiers of one compute device, opened when first used, and the engine that moves payloads to them."""

    def __init__(self, device: Device, options: StoreOptions, ledger: Ledger, trace: Trace | None) -> None:
        self.device = device
        self.engine = Engine(device, ledger, options.window.limit_nbytes, trace, poison=options.verify)
        self.lengths = Cells(device, LENGTH_NBYTES)
        self.late: deque[tuple[ref[Any], Cell, Sequence[str], Any]] = deque()  # whose lengths are on their way
        self.late_lock = Lock()
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
        """The buffers in which payloads lie without a slot, where a tier is ours and host memory as the device's."""
        tier = self.tier(name)
        return tier.pool if type(tier) is DeviceTier or type(tier) is HostMemoryTier else None

    def reserve(self, name: str, nbytes: int) -> Slot | None:
        """Room in a tier, or None."""
        tier = self.tier(name)
        slot = tier.reserve(nbytes)
        if slot is not None:
            slot.tier = tier
        return slot

    def stage(self, nbytes: int) -> Slot:
        """Memory of the compute device for a payload on its way."""
        slot = self.reserve("device", nbytes)
        if slot is None:
            raise CapacityError(f"no room for {format_nbytes(nbytes)} on the compute device", nbytes=nbytes)
        return slot

    def start(self, step: int) -> None:
        """Begin a new step: return memory that the last one did not need."""
        self.engine.start(step)
        for tier in list(self._open.values()):
            tier.trim()

    def close(self) -> None:
        with ExitStack() as stack:  # all are closed, also when one fails
            with self.late_lock:
                late = [length for _, length, _, _ in self.late]
                self.late.clear()
            stack.callback(self.lengths.close, late)
            stack.callback(self.engine.close)
            for tier in self._open.values():
                stack.callback(tier.close)
