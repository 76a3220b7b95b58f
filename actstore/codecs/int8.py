"""int8: symmetric 8-bit blocks. The format: csrc/int8.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from actstore.codecs.dispatch import KernelCodec
from actstore.errors import ConfigError

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
GROUPS = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Int8(KernelCodec):
    """One signed byte per element and one bfloat16 scale per `group` consecutive elements in storage order.

    Parameters
    ----------
    group : elements that share a scale, a power of two from 32 to 1024: 8 + 16 / `group` bits per element

    Raises
    ------
    ConfigError : another group size

    Notes
    -----
    dtypes: float32, float16, bfloat16. With ``m`` the largest finite magnitude of a group and
    ``s <= m / 127 * (1 + 2**-7)`` its scale, ``|x - decode(encode(x))| <= s / 2`` plus half a unit in the last place of
    the dtype; a group with ``m < 2**-110`` decodes to zeros. NaN and Inf decode to NaN and leave their group alone; a
    finite value never decodes to Inf; -0.0 decodes to +0.0.
    """

    name = "int8"
    lossless = False

    group: int = 128
    round: Literal["nearest", "stochastic", "dither"] = "nearest"

    @property
    def keyed(self) -> bool:
        return self.round != "nearest"

    def __post_init__(self) -> None:
        if type(self.group) is not int or self.group not in GROUPS:
            raise ConfigError(
                f"int8(group={self.group!r}) does not exist; choose a power of two from {GROUPS[0]} to {GROUPS[-1]}",
                group=self.group,
            )

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPES

    def _nbytes(self, numel: int, itemsize: int) -> int:
        return ((numel + 15) & -16) + 2 * -(-numel // self.group)
