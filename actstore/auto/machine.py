"""The machine that measurements hold for."""

from __future__ import annotations

import os
import platform

import torch

from actstore._version import __version__


def machine_of(device: torch.device) -> dict[str, str]:
    """Return the properties of the machine that step times depend on."""
    name = platform.processor() or platform.machine()
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {
        "device": name,
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else str(os.cpu_count()),
        "torch": ".".join(torch.__version__.split("+")[0].split(".")[:2]),
        "actstore": __version__,
    }
