"""Kernels of the codecs on each device, their caches, and what CUDA reports of itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from actstore.cli.machine.packages import Package
from actstore.codecs import registry
from actstore.codecs.dispatch import KernelCodec
from actstore.devices import Accelerator
from actstore.errors import KernelUnavailable


@dataclass(frozen=True)
class Kernels:
    """Back end of the codecs on one kind of device.

    Attributes
    ----------
    back_end : the package, or PyTorch operations, which are slower
    others : back end of the codecs of each further library, by library
    folder : cache of compiled kernels; the environment variable `variable` moves it
    cached : number of up-to-date compiled kernels of each source; empty where it is unknown
    error : reason why the cache cannot be used
    """

    device: str
    codecs: tuple[str, ...]
    back_end: str
    folder: str = ""
    variable: str = ""
    cached: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    others: Mapping[str, str] = field(default_factory=dict)


def kernels(found: Mapping[str, Package]) -> list[Kernels]:
    """Return the back end of codecs on the CPU, and on GPUs where there are any. Compiles nothing."""
    codecs = tuple(name for name in registry.names() if issubclass(registry.get(name), KernelCodec))
    eight_bits = {"bnb8": _library(found["bitsandbytes"])}
    here = [replace(_on_cpu(codecs, found), others={"zstd, lz4": _library(found["blosc2"]), **eight_bits})]
    if torch.cuda.is_available():
        here.append(replace(_on_cuda(codecs, found), others=eight_bits))
    return here


def _library(package: Package) -> str:
    return package.name if package.state == "installed" else f"{package.name} ({package.state})"


def _on_cpu(codecs: tuple[str, ...], found: Mapping[str, Package]) -> Kernels:
    if found["numba"].state != "installed":
        return Kernels("CPU", codecs, "PyTorch operations")
    from actstore.kernels.cpu import cache

    try:
        folder = cache.folder()
    except KernelUnavailable as error:
        return Kernels("CPU", codecs, "PyTorch operations", variable=cache.VARIABLE, error=str(error))
    cached = {source: cache.cached(source) for source in cache.sources()}
    return Kernels("CPU", codecs, "numba", str(folder), cache.VARIABLE, cached)


def _on_cuda(codecs: tuple[str, ...], found: Mapping[str, Package]) -> Kernels:
    if found["cupy"].state != "installed" or torch.version.hip is not None:
        return Kernels("GPU", codecs, "PyTorch operations")
    variable = "CUPY_CACHE_DIR"
    folder = os.environ.get(variable) or Path.home() / ".cupy" / "kernel_cache"
    return Kernels("GPU", codecs, "CuPy", str(folder), variable)


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
