"""Kernels of the codecs on each device, and their caches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from actstore.cli.machine.packages import Package
from actstore.codecs import registry
from actstore.codecs.dispatch import KernelCodec
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
