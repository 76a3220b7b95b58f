"""Compilation of CUDA sources with NVRTC, through CuPy, once per source and device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from actstore.base import source
from actstore.errors import KernelBuildError, KernelUnavailable


@cache
def function(name: str, kernel: str, device: int) -> Any:
    """Compile the kernel `kernel` of ``csrc/<name>.cu`` for a CUDA device, and return it as a `cupy.cuda.Function`.

    Raises
    ------
    KernelUnavailable : CuPy is not installed
    KernelBuildError : the compiler failed; `log` holds its output
    """
    cupy = _cupy()
    with torch.cuda.device(device):
        try:
            return _module(name).get_function(kernel).kernel
        except cupy.cuda.compiler.CompileException as error:
            raise KernelBuildError(
                f"csrc/{name}.cu did not compile on device {device} ({torch.cuda.get_device_name(device)}). "
                f"Report this log:\n{error}",
                log=str(error),
                device=device,
            ) from error


@cache
def _module(name: str) -> Any:
    text, digest = source.read(f"{name}.cu")
    return _cupy().RawModule(code=text, options=("-std=c++17", f"-DACTSTORE_SOURCE=0x{digest[:8]}"), backend="nvrtc")


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        major = (torch.version.cuda or "13").partition(".")[0]
        raise KernelUnavailable(
            f"CuPy is not installed. Run pip install 'actstore[cuda{major}]'.", package=f"cupy-cuda{major}x"
        ) from error
    return cupy
