"""raw on the CPU: a copy without a compiler. The bytes: csrc/raw.md."""

from __future__ import annotations

from ctypes import memmove

import torch

from actstore.kernels.base import Kernels, payload_pointer
from actstore.kernels.cpu.threads import TEAM_NBYTES
from actstore.kernels.torch import raw as raw_torch


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for one dtype."""
    itemsize = dtype.itemsize
    on_threads = raw_torch.kernels(dtype, device)  # torch copies on all its threads

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        nbytes = numel * itemsize
        if nbytes < TEAM_NBYTES:
            memmove(payload_pointer(out), src.data_ptr(), nbytes)
        else:
            on_threads.encode(src, out, numel, key)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        nbytes = numel * itemsize
        if nbytes < TEAM_NBYTES:
            memmove(out.data_ptr(), payload_pointer(buf), nbytes)
        else:
            on_threads.decode(buf, out, numel, key)

    return Kernels(encode, decode)
