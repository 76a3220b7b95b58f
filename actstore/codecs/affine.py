"""The base classes of codecs of affine blocks. The format: csrc/affine.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from actstore.codecs.checks import require_choice
from actstore.codecs.signs import SIGNS, SignedCodec, Signs
from actstore.kernels.affine import sections

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
GROUPS = (32, 64, 128, 256)
ROUNDINGS = ("nearest", "stochastic", "dither")


class AffineCodec(SignedCodec):
    """Codes of `bits` bits, and a bfloat16 scale and minimum per `group` consecutive elements in storage order."""

    lossless = False
    bits: ClassVar[int]

    group: int
    round: str
    signs: Signs

    @property
    def keyed(self) -> bool:
        return self.round != "nearest"

    @property
    def kernel_name(self) -> str:
        return "affine"

    def __post_init__(self) -> None:
        require_choice(self, "group", GROUPS)
        require_choice(self, "round", ROUNDINGS)
        require_choice(self, "signs", SIGNS)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPES

    def _options(self) -> dict[str, Any]:
        return {"bits": self.bits, "group": self.group, "round": self.round, "keep": self.signs == "keep"}

    def _nbytes(self, numel: int, itemsize: int) -> int:
        return sections(numel, self.bits, self.group).nbytes


@dataclass(frozen=True)
class BlockCodec(AffineCodec):
    """The options of `int3` to `int6`."""

    group: int = 32
    round: Literal["nearest", "stochastic", "dither"] = "nearest"
    signs: Signs = "auto"
