"""What a kernel module gives to its codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from actstore.errors import SpecError

Kernel = Callable[[torch.Tensor, torch.Tensor, int], None]

ALIGN = 16  # sections of a payload, and payloads themselves, start at multiples of this many bytes


class Kernels(NamedTuple):
    """The two directions of one codec for one dtype and device.

    Attributes
    ----------
    encode : (src, out, numel); `numel` > 0 elements of `src`, in storage order, to the payload `out`
    decode : (buf, out, numel); the payload `buf` to `numel` > 0 elements of `out`
    itemsize : bytes of one element
    """

    encode: Kernel
    decode: Kernel
    itemsize: int


def payload_pointer(payload: torch.Tensor) -> int:
    """The address of a payload.

    Raises
    ------
    SpecError : not a multiple of 16: kernels load and store 16 bytes at once
    """
    pointer = payload.data_ptr()
    if pointer % ALIGN:
        raise SpecError(
            f"a payload buffer starts at address {pointer:#x}, not at a multiple of {ALIGN}; "
            f"slice buffers at multiples of {ALIGN} bytes",
            pointer=pointer,
        )
    return pointer


def storage_slice(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """`count` elements of a dense tensor, in storage order, from the `start`-th on, as a 1-d view."""
    return tensor.detach().as_strided((count,), (1,), tensor.storage_offset() + start)
