"""The tier where the plan of a compiled model lets saved tensors wait, and the way there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf
from weakref import ref

import torch
from torch.utils._python_dispatch import _disable_current_modes

from actstore.auto.links import rates_alone
from actstore.compiled.budget.costs import bytes_per_ms
from actstore.compiled.budget.lane import MIN_NBYTES, TierLane
from actstore.plan.wish import Wish
from actstore.store.store import Store
from actstore.tiers.arena import SEGMENT_NBYTES
from actstore.tiers.options import Window

HOST_WINDOWS_NBYTES = 4 * 2**20, 8 * 2**20, 16 * 2**20
DEVICE_WINDOWS_NBYTES = 32 * 2**20, 128 * 2**20
USED_SHARE, FILE_SHARE = 0.75, 0.99  # of the limit of a tier
PAYLOAD_NBYTES = 4 * 2**20  # of those that are timed


def tier_of(wish: Wish, window: Window, device: torch.device) -> tuple[str, float] | None:
    """Return the tier that a plan may use, and the most bytes there; None for none.

    Host memory for another device than the CPU, or else the disk that the user grants. None as well where payloads may
    stay on the device when the window is full: no plan knows how many.
    """
    if window.when_full != "wait":
        return None
    for name, nbytes in (("host", 0 if device.type == "cpu" else wish.host), ("disk", wish.disk)):
        if nbytes != 0:
            return name, inf if nbytes is None else nbytes
    return None


def windows_of(window: Window, device: torch.device) -> tuple[int, ...]:
    """Return the windows that a plan may choose from, where the user has given `window`."""
    most = window.limit_nbytes
    windows = HOST_WINDOWS_NBYTES if device.type == "cpu" else DEVICE_WINDOWS_NBYTES
    return windows if most is None else (*(each for each in windows if each < most), most)


def lanes_of(
    store: Store, tier: tuple[str, float] | None, windows: tuple[int, ...]
) -> Callable[[torch.device], TierLane | None]:
    """Return a function that measures the way from a device to a tier, once. Compiled code keeps it, but not the store.

    A tier holds fewer bytes than its limit: pinned memory has idle parts, and files have blocks.
    """
    weak = ref(store)

    @cache
    def lane_of(device: torch.device) -> TierLane | None:
        store = weak()
        if tier is None or store is None:
            return None
        name, limit = tier
        with _disable_current_modes(), torch.no_grad():
            place = store.place(device)
            if name == "host" and place.device.on_host:
                return None  # the model has moved to the CPU since it was compiled
            limit = USED_SHARE * (limit - SEGMENT_NBYTES) if name == "host" else FILE_SHARE * limit
            rates = rates_alone(place, name, PAYLOAD_NBYTES)
            if rates is None:
                return None
            on_host, recycles = place.device.on_host, place.device.recycles(MIN_NBYTES)
            return TierLane(name, limit, *rates, bytes_per_ms(device), windows, on_host, recycles)

    return lane_of
