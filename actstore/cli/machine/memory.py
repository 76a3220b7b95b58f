"""Memory of the machine, of the control group, and the limit of locked memory."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT_NBYTES = 1 << 60  # version 1 of control groups writes a number near 2**63 for no limit


@dataclass(frozen=True)
class Memory:
    """Sizes in bytes; None for no limit, or where the system does not tell."""

    total_bytes: int | None
    available_bytes: int | None
    cgroup_bytes: int | None
    locked_bytes: int | None


def memory() -> Memory:
    """Read the sizes from the system."""
    info = _info()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Memory(
        info.get("MemTotal"),
        info.get("MemAvailable"),
        cgroup_limit(),
        None if locked == resource.RLIM_INFINITY else locked,
    )


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """Return the least limit of the control groups around this process, of version 2 or 1; None without any."""
    limits = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for each in (group, *group.parents):
            text = _text(mount / each / name).strip()
            if text.isdecimal() and int(text) < NO_LIMIT_NBYTES:
                limits.append(int(text))
    return min(limits, default=None)


def _info() -> dict[str, int]:
    found = re.findall(r"^(\w+): +(\d+) kB$", _text(Path("/proc/meminfo")), re.MULTILINE)
    return {name: 1024 * int(value) for name, value in found}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
