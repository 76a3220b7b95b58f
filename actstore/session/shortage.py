"""The limit of memory that an error ran into."""

from __future__ import annotations

import re
import resource
from typing import NamedTuple

import torch

from actstore.auto.machine import ran_out
from actstore.base.units import format_nbytes
from actstore.devices import cpu_memory, refusals
from actstore.devices.host_memory import cgroup_limit, machine_bytes
from actstore.session.process import status_bytes

_ASKED = re.compile(r"you tried to allocate (\d+) bytes")


class Shortage(NamedTuple):
    """A limit of memory, and what was left of it; all in bytes.

    Attributes
    ----------
    limit : its name
    total, free : of it
    asked : of the request that was refused; 0 where unknown
    detail : text about the rest; empty without
    """

    limit: str
    total: int
    free: int
    asked: int
    detail: str = ""

    def __str__(self) -> str:
        """Return text such as ``2.0 GiB asked for, 1.2 GiB of 80.0 GiB (cuda:0) free``."""
        asked = f"{format_nbytes(self.asked)} asked for, " if self.asked else ""
        return f"{asked}{format_nbytes(self.free)} of {format_nbytes(self.total)} ({self.limit}) free{self.detail}"


def shortage_of(error: BaseException, device: torch.device | None) -> Shortage | None:
    """Return the shortage of a compute device's memory behind an error; None where it is unknown, or another memory's.

    Parameters
    ----------
    device : the compute device; None for a CPU
    """
    if not ran_out(error):
        return None
    if device is None or device.type == "cpu":
        return _on_host(error)
    if device.type != "cuda" or not isinstance(error, torch.OutOfMemoryError):
        return None
    index: int | None = device.index
    found = refusals.take(torch.accelerator.current_device_index() if index is None else index)
    if found is None:
        return None
    free = min(found.free, max(0, found.total - found.reserved))
    detail = f"; PyTorch had {format_nbytes(found.allocated)} allocated, {format_nbytes(found.reserved)} reserved"
    return Shortage(str(device), found.total, free, found.asked, detail)


def _on_host(error: BaseException) -> Shortage | None:
    asked = _ASKED.search(str(error))
    used, idle = status_bytes(), cpu_memory.idle_bytes()
    limits = {
        "RLIMIT_DATA": (_soft(resource.RLIMIT_DATA), used.get("VmData")),
        "RLIMIT_AS": (_soft(resource.RLIMIT_AS), used.get("VmSize")),
        "control group": (cgroup_limit(), used.get("VmRSS")),
        "machine": (machine_bytes().get("MemTotal"), used.get("VmRSS")),
    }
    found = [
        Shortage(name, total, max(0, total - now) + idle, int(asked[1]) if asked else 0)
        for name, (total, now) in limits.items()
        if total is not None and now is not None
    ]
    return min(found, key=lambda shortage: shortage.free, default=None)


def _soft(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
