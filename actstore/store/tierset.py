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

from actstore.base import extensions
from actstore.base.ledger import Ledger
from actstore.base.units import format_nbytes
from actstore.devices import Device
from actstore.errors import ActstoreError, CapacityError, ConfigError
from actstore.kernels.base import LENGTH_NBYTES
from actstore.tiers import BufferPool, DeviceTier, DiskTier, HostMemoryTier, HostTier, Limited, Slot, Tier
from actstore.trace import Trace
from actstore.transfer import Cell, Cells, Engine


@dataclass(frozen=True)
class StoreOptions:
    """Where tiers live and how much they may hold; budgets in bytes, None for no limit."""

    host_budget_nbytes: int | None = None
    disk_budget_nbytes: int | None = None
    disk_path: str | PathLike[str] | None = None
    gpu_direct: bool = False  # to disk and back without host memory in between
    window_nbytes: int | None = None  # on their way to one tier, and fetched ahead; None for a default
    when_full: str = "wait"  # when that many are on their way: "wait", "keep" or "spill"
    strict: bool = False
    seed: int = 0  # of the random bits that codecs round with
    trace: bool = False  # write down what happens when
    verify: bool = False  # check every payload against its checksum


class TierSet:
    """The tiers of one compute device, opened when first used, and the engine that moves payloads to them."""

    def __init__(self, device: Device, options: StoreOptions, ledger: Ledger, trace: Trace | None) -> None:
        self.device = device
        self.engine = Engine(device, ledger, options.window_nbytes, trace, poison=options.verify)
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
                    tier = self._open[name] = self._make(name)
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

    def _make(self, name: str) -> Tier:
        options, device = self._options, self.device
        if name == "device":
            return DeviceTier(device)
        if name == "disk":
            tier = DiskTier(options.disk_path, device, gpu_direct=options.gpu_direct)
            return _limited(tier, options.disk_budget_nbytes)
        if name != "host":
            return _foreign(name, device)
        if device.on_host:
            return _limited(HostMemoryTier(device), options.host_budget_nbytes)
        return HostTier(device, options.host_budget_nbytes)


def _foreign(name: str, device: Device) -> Tier:
    """A tier of another package."""
    kind = extensions.load(extensions.TIERS, name, Tier)
    try:
        tier: Tier = kind(device)
    except ActstoreError:
        raise
    except Exception as error:  # whatever another package may raise
        raise ConfigError(
            f"the tier {name!r} cannot be opened: {type(error).__name__}: {error}; it is "
            f"{extensions.source(extensions.TIERS, name)}",
            tier=name,
        ) from error
    return tier


def _limited(tier: Tier, budget_nbytes: int | None) -> Tier:
    return tier if budget_nbytes is None else Limited(tier, budget_nbytes)
