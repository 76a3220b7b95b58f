"""Launches of compiled kernels on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from actstore.kernels.cuda import build

THREADS = 256  # per block

Launch = Callable[..., None]


class _Stream(NamedTuple):
    """A stream in the form that CuPy takes."""

    ptr: int


def launcher(name: str, kernel: str, device: torch.device) -> Launch:
    """Return a function ``(blocks, *args)`` that launches a kernel of ``csrc/<name>.cu`` on `device`.

    A block has THREADS threads. Every parameter of the kernel is 64 bits wide: a pointer, given as the tensor that it
    points to (None: null), or a size, given as an int. No two tensors of a launch overlap.

    Raises
    ------
    KernelUnavailable, KernelBuildError : see `build.function`
    """
    index = device.index
    function = build.function(name, kernel, index)
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
