"""Places where payloads wait: device, the ranks of a group, host memory, disk."""

from actstore.base.ticket import DONE, Ticket
from actstore.devices import Cpu, Device
from actstore.tiers.base import Slot, Tier
from actstore.tiers.device import DeviceTier, too_late
from actstore.tiers.disk import DiskTier
from actstore.tiers.group import GroupTier
from actstore.tiers.host import HostMemoryTier, HostTier
from actstore.tiers.limited import Limited
from actstore.tiers.options import Disk, Group, Host, PluginTier, Window
from actstore.tiers.pool import BufferPool

__all__ = [
    "DONE",
    "BufferPool",
    "Cpu",
    "Device",
    "DeviceTier",
    "Disk",
    "DiskTier",
    "Group",
    "GroupTier",
    "Host",
    "HostMemoryTier",
    "HostTier",
    "Limited",
    "PluginTier",
    "Slot",
    "Ticket",
    "Tier",
    "Window",
    "too_late",
]
