"""Sizes of host memory that Linux reports: of the machine, and limits of control groups."""

from __future__ import annotations

import re
from pathlib import Path

NO_LIMIT_NBYTES = 1 << 60  # version 1 of control groups writes a number near 2**63 for no limit


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


def machine_bytes() -> dict[str, int]:
    """Return the sizes of /proc/meminfo in bytes, by name; empty where the system has no such file."""
    found = re.findall(r"^(\w+): +(\d+) kB$", _text(Path("/proc/meminfo")), re.MULTILINE)
    return {name: 1024 * int(value) for name, value in found}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
