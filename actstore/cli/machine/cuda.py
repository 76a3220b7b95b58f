"""GPUs, as PyTorch sees them, and pinned memory of their driver."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from actstore.devices import Accelerator

PINNED_NBYTES = 1 << 30
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """A device: its name, its memory in bytes, and its compute capability."""

    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True)
class Cuda:
    """CUDA version of PyTorch, the driver of the machine, and its devices.

    `pinned_bytes` is how much of `PINNED_NBYTES` the driver pinned on request; None without a device.
    """

    runtime: str | None
    driver: str | None
    devices: tuple[Gpu, ...] = ()
    pinned_bytes: int | None = None


def cuda() -> Cuda:
    """Look at the devices, and pin memory for a moment where there is one."""
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    built = runtime if torch.version.hip or torch.version.cuda else None
    if not torch.cuda.is_available():
        return Cuda(built, driver(DRIVER))
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = tuple(Gpu(each.name, each.total_memory, f"{each.major}.{each.minor}") for each in devices)
    return Cuda(built, driver(DRIVER), gpus, _pinned())


def driver(path: Path) -> str | None:
    """Return the version of NVIDIA's driver; None where it is not loaded."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", path.read_text())
    except OSError:
        return None
    return found[1] if found else "unknown"


def _pinned() -> int:
    device = Accelerator(torch.device("cuda", 0))
    memory = device.pinned(PINNED_NBYTES)
    if memory is None:
        return 0
    device.unpin(memory)
    return PINNED_NBYTES
