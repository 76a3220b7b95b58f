"""Compilation of CUDA sources with NVRTC, through CuPy, once per source and device, and launches on torch's stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from actstore.base import source
from actstore.errors import KernelBuildError, KernelUnavailable
from actstore.kernels.planes import TILE

THREADS = 256  # per block

Launch = Callable[..., None]


@cache
def compiled(name: str, kernel: str, device: int) -> Any:
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


class _Stream(NamedTuple):
    """A stream in the form that CuPy takes."""

    ptr: int


def launcher(name: str, kernel: str, device: torch.device) -> Launch:
    """Return a function ``(blocks, *args)`` that launches a kernel of ``csrc/<name>.cu`` on `device`.

    A block has THREADS threads. Every parameter of the kernel is 64 bits wide: a pointer, given as the tensor that it
    points to (None: null), or a size, given as an int. No two tensors of a launch overlap.

    Raises
    ------
    KernelUnavailable, KernelBuildError : see `compiled`
    """
    index = device.index
    function = compiled(name, kernel, index)
    block = (THREADS,)

    def launch(blocks: int, *args: torch.Tensor | int | None) -> None:
        words = [arg if type(arg) is int else 0 if arg is None else arg.data_ptr() for arg in args]  # type: ignore[union-attr]
        function((blocks,), block, words, stream=_Stream(torch.cuda.current_stream(index).cuda_stream))

    def launch_elsewhere(blocks: int, *args: torch.Tensor | int | None) -> None:
        if torch.cuda.current_device() == index:
            launch(blocks, *args)
        else:
            with torch.cuda.device(index):
                launch(blocks, *args)

    return launch if torch.cuda.device_count() == 1 else launch_elsewhere


def tile_blocks(numel: int) -> int:
    """Count the blocks of a launch with a warp for each tile of 1024 elements."""
    return -(-numel // (TILE * THREADS // 32))
