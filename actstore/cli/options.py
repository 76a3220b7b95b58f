"""Options that several commands share."""

from __future__ import annotations

from actstore import Disk, Host


def tiers_of(host_budget: str | None, disk_budget: str | None, disk_path: str | None) -> list[Host | Disk]:
    """Return the tiers of a store, as a command's options describe them."""
    return [Host(host_budget), Disk(disk_path, disk_budget)]
