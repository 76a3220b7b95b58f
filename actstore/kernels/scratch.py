"""Memory for intermediate values of chained codecs."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

from actstore.base.units import round_up
from actstore.devices.cpu import HUGE_PAGE_NBYTES

_ADVISED_NBYTES = 4 * HUGE_PAGE_NBYTES

_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None


def scratch(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialized 1-d tensor that is soon freed.

    Notes
    -----
    On Linux large CPU memory asks for huge pages: page faults of fresh small pages cost more time than the codec.
    """
    memory = torch.empty(numel, dtype=dtype, device=device)
    if _madvise is not None and device.type == "cpu" and memory.nbytes >= _ADVISED_NBYTES:
        start = round_up(memory.data_ptr(), HUGE_PAGE_NBYTES)
        nbytes = (memory.data_ptr() + memory.nbytes - start) // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
        # if the system ignores the advice, only the time changes
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)
    return memory
