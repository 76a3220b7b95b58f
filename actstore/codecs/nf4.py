"""nf4: blocks of 4-bit NormalFloat. The format: csrc/nf4.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from actstore.codecs.affine import GROUPS
from actstore.codecs.checks import require_choice
from actstore.codecs.dispatch import KernelCodec, Signs
from actstore.codecs.groups import GroupCodec
from actstore.errors import ConfigError
from actstore.kernels.rows import Format

BNB_GROUP = 64


@dataclass(frozen=True)
class Nf4(GroupCodec):
    """One of the 16 NormalFloat4 values per element, scaled by the largest magnitude of `group` elements of a row.

    Parameters
    ----------
    group : elements that share a scale: 32, 64, 128 or 256: 4 + 16 / `group` bits per element
    layout : ``plain`` stores the largest magnitude as bfloat16; ``bnb``, with groups of 64 only, writes the bytes of
        ``bitsandbytes.functional.quantize_4bit``, 4.5 bits per element
    signs : ``keep`` keeps zeros, positive and negative elements apart, ``round`` does not; ``auto`` is ``keep`` in a
        store where backward decides by the sign of a tensor, as after ReLU, else ``round``

    Raises
    ------
    ConfigError : another group size or layout, or a group other than 64 with ``layout=bnb``

    Notes
    -----
    dtypes: float32, float16, bfloat16. With ``a`` the stored largest magnitude of a group,
    ``|x - decode(encode(x))| <= 0.152 * a`` plus half a unit in the last place of the dtype; a group with all
    magnitudes below ``2**-110`` decodes to zeros. A group with NaN or Inf decodes to NaN; a finite value never decodes
    to Inf; -0.0 decodes to +0.0. With ``signs=keep`` elements nearer to zero than to the next value become that value,
    also in groups below ``2**-110``, except with ``layout=bnb``.
    """

    name = "nf4"

    group: int = 32
    layout: Literal["plain", "bnb"] = "plain"
    signs: Signs = "auto"

    def __post_init__(self) -> None:
        require_choice(self, "group", GROUPS)
        require_choice(self, "layout", ("plain", "bnb"))
        super().__post_init__()
        if self.layout == "bnb" and self.group != BNB_GROUP:
            raise ConfigError(
                f"nf4(layout=bnb) has groups of {BNB_GROUP} elements, not of {self.group}. "
                f"Write nf4(group={BNB_GROUP}, layout=bnb).",
                group=self.group,
            )

    def _options(self) -> dict[str, Any]:
        return {"layout": self.layout, **super()._options()}

    @property
    def _form(self) -> Format:
        return Format((4,), (2 if self.layout == "plain" else 4,))

    @property
    def shaped(self) -> bool:
        return self.layout == "plain"

    def _fitted(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[KernelCodec, int]:
        """Fit groups to rows; bitsandbytes knows none."""
        return super()._fitted(shape, stride) if self.layout == "plain" else (self, 0)
