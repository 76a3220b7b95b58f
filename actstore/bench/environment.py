"""Environment of a benchmark run."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from actstore._version import __version__
from actstore.bench.trainer import cores
from actstore.bench.workloads.text import text_digest

PACKAGES = (
    "numpy", "numba", "scipy", "scikit-learn", "blosc2", "cupy-cuda12x", "cupy-cuda13x", "triton",
    "bitsandbytes", "deepspeed", "torchtune", "torchao", "trl", "transformers", "accelerate",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Return versions, processor, memory and GPU; nothing that names the machine or its user."""
    found: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "actstore": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else None,
        "text_sha256": text_digest(),
        "gpu": None,
    }
    found.update({name: _version(name) for name in PACKAGES})
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found["gpu"] = device.name
        found["gpu_memory_bytes"] = device.total_memory
        found["gpu_capability"] = f"{device.major}.{device.minor}"
        found["cuda"] = torch.version.cuda
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
