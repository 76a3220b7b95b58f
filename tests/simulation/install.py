"""Puts the simulation below the store."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import actstore.base.reaper
import actstore.devices
from actstore.devices.base import Device
from tests.simulation.device import SimDevice
from tests.simulation.locks import SimCondition, SimDeque, SimEvent, SimLock, SimRLock, SimSemaphore
from tests.simulation.tracing import trace_codecs, trace_files

_now: list[SimDevice] = []


def here() -> SimDevice | None:
    """The device of the innermost `simulation`."""
    return _now[-1] if _now else None


@contextmanager
def use(device: SimDevice) -> Iterator[None]:
    """Within this, stores that are made get `device`."""
    _now.append(device)
    try:
        yield
    finally:
        _now.remove(device)


@contextmanager
def simulation(seed: int = 0, *, timed: bool = False, lead_ns: int = 0) -> Iterator[SimDevice]:
    """One run: at the end all that is left runs, and what was wrong raises AssertionError."""
    device = SimDevice(seed, timed=timed, lead_ns=lead_ns)
    collects = gc.isenabled()
    gc.disable()  # the same seed frees memory at the same moments
    try:
        with use(device):
            yield device
            device.finish()
            device.check()
    finally:
        device.close()
        if collects:
            gc.enable()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within `simulation`, actstore's devices, locks, clocks and codecs are simulated; elsewhere all is as it was."""
    open_device = actstore.devices.open_device

    def open_simulated(torch_device: torch.device) -> Device:
        return here() or open_device(torch_device)

    monkeypatch.setattr(actstore.devices, "open_device", open_simulated)
    replaced = _replacements()
    for name, module in list(sys.modules.items()):
        if name.startswith("actstore.") and not name.startswith(("actstore.bench", "actstore.kernels")):
            for attribute, value in list(vars(module).items()):
                if value is open_device:
                    monkeypatch.setattr(module, attribute, open_simulated)
                for original, substitute in replaced:
                    if value is original:
                        monkeypatch.setattr(module, attribute, substitute)
    monkeypatch.setattr(actstore.base.reaper, "deque", _made(SimDeque, deque))
    trace_codecs(monkeypatch, here)
    trace_files(monkeypatch, here)


def _made(simulated: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        device = here()
        return original(*args, **kwargs) if device is None else simulated(device.scheduler, *args, **kwargs)

    return make


def _replacements() -> list[tuple[object, object]]:
    real_ns = time.perf_counter_ns

    def now_ns() -> int:
        device = here()
        return real_ns() if device is None else device.scheduler.here.now_ns

    return [
        (threading.Lock, _made(SimLock, threading.Lock)),
        (threading.RLock, _made(SimRLock, threading.RLock)),
        (threading.Condition, _made(SimCondition, threading.Condition)),
        (threading.Event, _made(SimEvent, threading.Event)),
        (threading.Semaphore, _made(SimSemaphore, threading.Semaphore)),
        (threading.BoundedSemaphore, _made(SimSemaphore, threading.BoundedSemaphore)),
        (time.perf_counter_ns, now_ns),
    ]
