"""Compute devices behind one interface: streams, memory, copies."""

from __future__ import annotations

import torch

from actstore.devices import cpu_memory
from actstore.devices.accelerator import Accelerator
from actstore.devices.base import Device, Workers
from actstore.devices.cpu import Cpu

__all__ = ["Accelerator", "Cpu", "Device", "Workers", "cpu_memory", "open_device"]


def open_device(torch_device: torch.device) -> Device:
    """Open the device of a `torch.device`; the first CPU gives PyTorch its allocator (`cpu_memory.install`)."""
    if torch_device.type != "cpu":
        return Accelerator(torch_device)
    cpu_memory.install()
    return Cpu(torch_device)
