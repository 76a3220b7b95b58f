"""Rates of the device of a fit: this CPU, measured, or a GPU by its data sheet."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import perf_counter_ns

import torch

from actstore.devices import Cpu
from actstore.errors import ConfigError
from actstore.plan.hardware import PRESETS, Hardware
from actstore.plan.solver.chain import Links
from actstore.tiers.disk import DiskTier

GPUS = {name.lower().replace(" ", "-"): hardware for name, hardware in PRESETS.items()}
_SIDE = 768  # of the matrices
_NBYTES = 32 * 2**20
_REPEATS = 5


def rates_of(device: str) -> Hardware:
    """Return the rates of a device, "cpu" for this CPU: that takes a second.

    Raises
    ------
    ConfigError : the device is unknown
    """
    if device == "cpu":
        return _this_cpu()
    if device not in GPUS:
        raise ConfigError(f"device={device!r}: must be one of {', '.join(['cpu', *GPUS])}.", device=device)
    return GPUS[device]


def _this_cpu() -> Hardware:
    flops = 2 * _SIDE**3
    single, half = (torch.ones(_SIDE, _SIDE, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    source, target = (torch.ones(_NBYTES, dtype=torch.uint8) for _ in range(2))
    disk = DiskTier(None, Cpu(torch.device("cpu")))
    try:
        slot = disk.reserve(_NBYTES)
        if slot is None:
            disk_out = disk_back = inf  # no payload can wait there
        else:
            disk_out = _NBYTES / _least_ms(lambda: disk.write(slot, source).result())
            disk_back = _NBYTES / _least_ms(lambda: disk.read(slot, target).result())
    finally:
        disk.close()
    return Hardware(
        Links(disk_out=disk_out, disk_back=disk_back, on_host=True),
        flops=flops / _least_ms(lambda: half @ half),
        single_flops=flops / _least_ms(lambda: single @ single),
        memory_rate=2 * _NBYTES / _least_ms(lambda: target.copy_(source)),
    )


def _least_ms(run: Callable[[], object]) -> float:
    """Return the milliseconds of the fastest of some runs."""
    times = []
    for _ in range(_REPEATS):
        begin = perf_counter_ns()
        run()
        times.append(perf_counter_ns() - begin)
    return min(times) / 1e6
