"""Places where payloads wait: device, the ranks of a group, host memory, disk."""

from actstore.base.ticket import DONE, Ticket
from actstore.devices import Cpu, Device
from actstore.tiers.base import Slot, Tier
from actstore.tiers.device import DeviceTier, HostMemoryTier, too_late
from actstore.tiers.options import Disk, Group, Host, PluginTier, Window
from actstore.tiers.pool import BufferPool

__all__ = [
    "DONE",
    "BufferPool",
    "Cpu",
    "Device",
    "DeviceTier",
    "Disk",
    "Group",
    "Host",
    "HostMemoryTier",
    "PluginTier",
    "Slot",
    "Ticket",
    "Tier",
    "Window",
    "too_late",
]
