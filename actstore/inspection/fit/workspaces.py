"""Memory that an operator takes on a CPU while it runs, beside its outputs.

The source of the rules: oneDNN copies images of several channels into a layout of its own and back, and batch
normalization makes a second gradient, as the allocator counts them under PyTorch 2.13 on x86-64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def workspace_nbytes(func: Any, flat: list[Any], made: Any) -> int:
    """Return the bytes for arguments and the first output; 0 for an operator without a rule."""
    rule = _RULES.get(func._schema.name)
    return 0 if rule is None else rule(flat, made)


def _convolution(flat: list[Any], made: Tensor) -> int:
    source, weight, _, stride = flat[:4]
    return max(source.nbytes + weight.nbytes, made.nbytes) if _is_copied(source, weight, stride) else 0


def _convolution_backward(flat: list[Any], made: Tensor | None) -> int:
    gradient, source, weight, _, stride = flat[:5]
    return source.nbytes + gradient.nbytes if _is_copied(source, weight, stride) else 0


def _batch_norm_backward(flat: list[Any], made: Tensor | None) -> int:
    source: Tensor = flat[1]
    return source.nbytes


def _is_copied(source: Tensor, weight: Tensor, stride: int) -> bool:
    """Return whether a convolution copies its source: neither one element by element, nor one of adjacent channels."""
    adjacent = source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last)
    return not adjacent and (weight.shape[2:].numel() > 1 or stride > 1)


_RULES: dict[str, Callable[[list[Any], Any], int]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::native_batch_norm_backward": _batch_norm_backward,
}
