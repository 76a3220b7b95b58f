"""The dynamic 8-bit blocks of bitsandbytes. The bytes: csrc/bnb8.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from actstore.errors import KernelUnavailable
from actstore.kernels.torch.groups import grouped

BLOCK_NUMEL = 256
CALL_NUMEL = 1 << 30  # elements in one call: bitsandbytes counts in 32 bits on CUDA devices


@cache
def library() -> Any:
    """Import the module bitsandbytes.functional.

    Raises
    ------
    KernelUnavailable : it is not installed
    """
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise KernelUnavailable(
            "bitsandbytes is not installed. Run pip install 'actstore[bnb]'.", package="bitsandbytes"
        ) from error
    return bitsandbytes.functional


def quantize(values: torch.Tensor, codes: torch.Tensor, absmaxes: torch.Tensor) -> None:
    """Write codes and largest magnitudes of 1-d `values`; NaN for a block with an element that is not finite."""
    functional, code = library(), _code(values.device)
    for first in range(0, len(values), CALL_NUMEL):
        part = values[first : first + CALL_NUMEL]
        with _legacy_stream(values.device):
            found, state = functional.quantize_blockwise(part, code=code, blocksize=BLOCK_NUMEL)
        codes[first : first + CALL_NUMEL] = found
        # bitsandbytes itself gives a finite value for NaN, and Inf for its whole block
        missing = grouped(part.isfinite().logical_not_(), BLOCK_NUMEL).any(1)
        absmaxes[first // BLOCK_NUMEL :][: len(missing)] = state.absmax.masked_fill(missing, torch.nan)


def dequantize(codes: torch.Tensor, absmaxes: torch.Tensor, values: torch.Tensor) -> None:
    """Fill 1-d `values` from codes and largest magnitudes."""
    functional, code = library(), _code(values.device)
    for first in range(0, len(values), CALL_NUMEL):
        blocks = absmaxes[first // BLOCK_NUMEL :][: CALL_NUMEL // BLOCK_NUMEL]
        state = functional.QuantState(absmax=blocks, code=code, blocksize=BLOCK_NUMEL, dtype=values.dtype)
        values[first : first + CALL_NUMEL] = functional.dequantize_blockwise(codes[first : first + CALL_NUMEL], state)


@cache
def _code(device: torch.device) -> torch.Tensor:
    """Return the 256 values of a code on a device: bitsandbytes keeps them on one, and would copy them in each call."""
    code: torch.Tensor = library().create_dynamic_map().to(device)
    return code


@contextmanager
def _legacy_stream(device: torch.device) -> Iterator[None]:
    """Order the work inside, which bitsandbytes puts on CUDA's legacy default stream, into the current stream.

    1. the legacy stream waits for all that the current stream has queued so far;
    2. the work runs;
    3. the current stream waits for the work: its later reads and frees are safe.
    """
    if device.type != "cuda":
        yield
        return
    current, legacy = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    legacy.wait_stream(current)
    yield
    current.wait_stream(legacy)
