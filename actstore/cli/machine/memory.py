"""Memory of the machine, of the control group, and the limit of locked memory."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from actstore.devices.host_memory import cgroup_limit, machine_bytes


@dataclass(frozen=True)
class Memory:
    """Sizes in bytes; None for no limit, or where the system does not tell."""

    total_bytes: int | None
    available_bytes: int | None
    cgroup_bytes: int | None
    locked_bytes: int | None


def memory() -> Memory:
    """Read the sizes from the system."""
    info = machine_bytes()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Memory(
        info.get("MemTotal"),
        info.get("MemAvailable"),
        cgroup_limit(),
        None if locked == resource.RLIM_INFINITY else locked,
    )
