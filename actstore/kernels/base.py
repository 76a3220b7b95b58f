"""The interface between a kernel module and its codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from actstore.errors import SpecError

ALIGN = 16  # bytes; sections of a payload, and payloads themselves, start at multiples of it
LENGTH_NBYTES = 8  # a payload of variable size begins with its length


Bound = Callable[[torch.Tensor, torch.Tensor, int], Any]


class Kernels(NamedTuple):
    """The two directions of one codec for one dtype and device.

    Attributes
    ----------
    encode : (src, out, numel, key); `numel` > 0 elements of `src`, in storage order, to the payload `out`.
        For a variable size it returns the bytes used, or on a device the bound; for a fixed one None
    decode : (buf, out, numel, key); the payload `buf` to `numel` > 0 elements of `out`
    bind : (numel) -> both, as functions (source, target, key) that cost less to call; None where a back end has none
    rows : (numel, width) -> both, likewise, for a tensor with rows of `width` elements, where payloads depend on them

    Notes
    -----
    `key` is 0 to 2**63 - 1. `encode` and `decode` of CUDA kernels take one more keyword, ``count``: an int64 tensor on
    the device that holds the actual number of elements, at most `numel`.
    """

    encode: Callable[..., Any]
    decode: Callable[..., Any]
    bind: Callable[[int], tuple[Bound, Bound]] | None = None
    rows: Callable[[int, int], tuple[Bound, Bound]] | None = None


class Inner(Protocol):
    """An inner codec, as the kernels of the codec around it see it."""

    @property
    def name(self) -> str: ...

    @property
    def kernel_name(self) -> str: ...

    @property
    def exact(self) -> bool:
        """Return whether `_nbytes` is the size of the payload, not a bound."""

    def kernels(self, back_end: str, dtype: torch.dtype, device: torch.device) -> Kernels:
        """Return the kernels of one back end."""

    def _options(self) -> dict[str, Any]:
        """Return the options of its kernels."""

    def _nbytes(self, numel: int, itemsize: int) -> int:
        """Return the bytes of the payload of `numel` elements."""


def round_up(nbytes: int) -> int:
    """Return the next multiple of 16, where a section may start."""
    return (nbytes + ALIGN - 1) & -ALIGN


def aligned(payload: torch.Tensor) -> torch.Tensor:
    """Return a payload, after a check of its address.

    Raises
    ------
    SpecError : not a multiple of 16: kernels load and store 16 bytes at once
    """
    payload_pointer(payload)
    return payload


def payload_pointer(payload: torch.Tensor) -> int:
    """Return the address of a payload.

    Raises
    ------
    SpecError : not a multiple of 16: kernels load and store 16 bytes at once
    """
    pointer = payload.data_ptr()
    if pointer % ALIGN:
        raise SpecError(
            f"a payload buffer starts at address {pointer:#x}, not at a multiple of {ALIGN}. "
            f"Slice buffers at multiples of {ALIGN} bytes.",
            pointer=pointer,
        )
    return pointer


def storage_slice(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """View `count` elements of a dense tensor, in storage order, from the `start`-th on, as a 1-d tensor."""
    return tensor.detach().as_strided((count,), (1,), tensor.storage_offset() + start)
