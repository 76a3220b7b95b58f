"""Compute devices behind one interface: streams, memory, copies."""

from __future__ import annotations

import torch

from actstore.devices.accelerator import Accelerator
from actstore.devices.base import Device, Workers
from actstore.devices.cpu import Cpu

__all__ = ["Accelerator", "Cpu", "Device", "Workers", "open_device"]


def open_device(torch_device: torch.device) -> Device:
    """The device of a tensor's `device`."""
    return Cpu(torch_device) if torch_device.type == "cpu" else Accelerator(torch_device)
