"""Memory of the machine and its limits, and the allocator of CPU tensors."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from actstore.devices import cpu_memory
from actstore.devices.host_memory import cgroup_limit, machine_bytes
from actstore.errors import ConfigError


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


@dataclass(frozen=True)
class Allocator:
    """Allocator that a store on a CPU gives PyTorch, with the reason where it is not the one `asked` for."""

    asked: str
    choice: str
    reason: str
    library: str | None
    compiler: str | None

    @property
    def is_broken(self) -> bool:
        """True where the choice is unknown, or pages were asked for, could be compiled or loaded, and do not work."""
        can = self.library is not None or self.compiler is not None
        return self.choice == "unknown" or (self.asked == "pages" and self.choice == "threshold" and can)


def allocator() -> Allocator:
    """Give PyTorch the allocator, which may compile it, and return the outcome."""
    asked = os.environ.get(cpu_memory.VARIABLE) or "pages"
    choice: str = "unknown"
    try:
        choice, reason = cpu_memory.install()
    except ConfigError as error:
        reason = str(error)
    library, compiler = cpu_memory.library_file(), cpu_memory.compiler()
    return Allocator(
        asked,
        choice,
        reason,
        None if library is None else str(library),
        None if compiler is None else " ".join(compiler),
    )
