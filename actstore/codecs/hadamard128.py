"""hadamard128: a random rotation before a lossy codec. The format: csrc/hadamard128.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from actstore.codecs.affine import Int4
from actstore.codecs.base import LOSSY_DTYPES, Codec, require_leaf
from actstore.codecs.dispatch import KernelCodec
from actstore.errors import ChainError
from actstore.kernels.base import Bound, Kernels, round_up
from actstore.kernels.hadamard128 import ROTATION_NUMEL
from actstore.kernels.rows import row_numel
from actstore.kernels.torch.hadamard128 import in_rows


@dataclass(frozen=True)
class Hadamard128(KernelCodec):
    """A chain: random signs and a Walsh-Hadamard transform rotate each 128 consecutive elements, which `inner` encodes.

    The rotation spreads an outlier over its 128 elements. That helps codecs with few levels where outliers are rare,
    and hurts data of one sign or with many zeros.

    Parameters
    ----------
    inner : a lossy codec that takes float32 and has no inner codec

    Raises
    ------
    ChainError : another kind of inner codec

    Notes
    -----
    dtypes: float32, float16, bfloat16. Bits per element are those of `inner`, the last 128 elements counted as a whole.
    The rotation keeps lengths. The error of a group, as the root of a sum of squares, is that of `inner` on the rotated
    group, plus at most ``2**-20`` of the group's length and half a unit in the last place of each element.
    Magnitudes below ``2**-96`` count as zero. 128 elements with one that is not finite, or with magnitudes whose sum is
    beyond float32, come back as NaN. So do all elements that `inner` loses together with them. Needs the key of
    `encode` to decode. Allocates float32 scratch of the size of the tensor.
    """

    name = "hadamard128"
    lossless = False

    inner: Codec = field(default_factory=Int4)

    def __post_init__(self) -> None:
        require_leaf(self.name, self.inner)
        inner = self.inner
        if isinstance(inner, KernelCodec) and inner.accepts(torch.float32) and not inner.lossless and inner._flat:
            return
        reason = (
            "is lossless, so that a rotation gains nothing"
            if inner.lossless
            else "needs whole rows"
            if isinstance(inner, KernelCodec) and not inner._flat
            else "does not run on rotated float32 elements"
        )
        raise ChainError(
            f"hadamard128({inner.name}) is refused: {inner.name} {reason}. "
            "Write hadamard128(int4), hadamard128(int8) or hadamard128(nf4).",
            inner=inner,
        )

    @property
    def exact(self) -> bool:
        return self._leaf.exact

    @property
    def keyed(self) -> bool:
        return True

    @property
    def _leaf(self) -> KernelCodec:
        """The inner codec, with the type that `__post_init__` has checked."""
        assert isinstance(self.inner, KernelCodec)
        return self.inner

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in LOSSY_DTYPES

    @property
    def shaped(self) -> bool:
        return True

    def _fitted(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Hadamard128, int]:
        width = row_numel(shape, stride)
        return self, width if width % ROTATION_NUMEL else 0

    def kernels(self, back_end: str, dtype: torch.dtype, device: torch.device) -> Kernels:
        kernels = super().kernels(back_end, dtype, device)
        wide = kernels if dtype is torch.float32 else super().kernels(back_end, torch.float32, device)

        def rows(numel: int, width: int) -> tuple[Bound, Bound]:
            return in_rows(wide, self._nbytes(numel, torch.float32.itemsize), numel, width)

        return kernels._replace(rows=rows)

    def _options(self) -> dict[str, Any]:
        return {"inner": self.inner}

    def _nbytes(self, numel: int, itemsize: int) -> int:
        return self._leaf._nbytes(-(-numel // ROTATION_NUMEL) * ROTATION_NUMEL, torch.float32.itemsize)

    def _rows_nbytes(self, numel: int, width: int) -> int:
        return round_up(self._nbytes(numel, torch.float32.itemsize)) + numel // width
