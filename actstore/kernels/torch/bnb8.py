"""The dynamic 8-bit blocks of bitsandbytes. The bytes: csrc/bnb8.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from actstore.errors import KernelUnavailable
from actstore.kernels.torch.groups import grouped

BLOCK = 256
AT_ONCE = 1 << 30  # elements: bitsandbytes counts in 32 bits on CUDA devices


@cache
def library() -> Any:
    """The module bitsandbytes.functional.

    Raises
    ------
    KernelUnavailable : it is not installed
    """
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise KernelUnavailable(
            "bitsandbytes is not installed; pip install 'actstore[bnb]'", package="bitsandbytes"
        ) from error
    return bitsandbytes.functional


def quantize(values: torch.Tensor, codes: torch.Tensor, absmaxes: torch.Tensor) -> None:
    """Write codes and largest magnitudes of 1-d `values`; NaN for a block with an element that is not finite."""
    functional, code = library(), _code(values.device)
    for first in range(0, len(values), AT_ONCE):
        part = values[first : first + AT_ONCE]
        with _legacy_stream(values.device):
            found, state = functional.quantize_blockwise(part, code=code, blocksize=BLOCK)
        codes[first : first + AT_ONCE] = found
        # bitsandbytes itself gives a finite value for NaN, and Inf for its whole block
        missing = grouped(part.isfinite().logical_not_(), BLOCK).any(1)
        absmaxes[first // BLOCK :][: len(missing)] = state.absmax.masked_fill(missing, torch.nan)


def dequantize(codes: torch.Tensor, absmaxes: torch.Tensor, values: torch.Tensor) -> None:
    """Fill 1-d `values` again."""
    functional, code = library(), _code(values.device)
    for first in range(0, len(values), AT_ONCE):
        blocks = absmaxes[first // BLOCK :][: AT_ONCE // BLOCK]
        state = functional.QuantState(absmax=blocks, code=code, blocksize=BLOCK, dtype=values.dtype)
        values[first : first + AT_ONCE] = functional.dequantize_blockwise(codes[first : first + AT_ONCE], state)


@cache
def _code(device: torch.device) -> torch.Tensor:
    """The 256 values of a code, on one device: bitsandbytes keeps them on one and would copy them in each call."""
    code: torch.Tensor = library().create_dynamic_map().to(device)
    return code


@contextmanager
def _legacy_stream(device: torch.device) -> Iterator[None]:
    """Order the work inside, which bitsandbytes puts on CUDA's legacy default stream, into the current stream.

    1. the legacy stream waits for what the current one was given so far;
    2. the work;
    3. the current stream waits for the work: what it frees or reads afterwards is safe.
    """
    if device.type != "cuda":
        yield
        return
    current, legacy = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    legacy.wait_stream(current)
    yield
    current.wait_stream(legacy)
