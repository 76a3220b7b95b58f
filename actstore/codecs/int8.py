"""int8: 8-bit blocks, symmetric or affine. The formats: csrc/int8.md, csrc/affine.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from actstore.base.layout import layout_of
from actstore.codecs.checks import require_choice
from actstore.codecs.dispatch import KernelCodec, Signs
from actstore.codecs.groups import GroupCodec
from actstore.errors import ConfigError
from actstore.kernels.affine import affine_format
from actstore.kernels.base import round_up
from actstore.kernels.rows import Format

GROUPS = (32, 64, 128, 256, 512, 1024)
ROUNDINGS = ("nearest", "stochastic", "dither")


@dataclass(frozen=True)
class Int8(GroupCodec):
    """One signed byte per element and one bfloat16 scale per `group` consecutive elements of a row.

    Parameters
    ----------
    group : elements that share a scale at most, a power of two from 32 to 1024: 8 + 16 / `group` bits per element of
        rows that it divides. Groups end with rows, which lie along the dimension with the least stride
    affine : whether codes count from the minimum of the group, which is stored beside the scale (16 / `group` bits
        more): half the error for data of one sign
    axis : which elements form a group: ``element``, consecutive ones of a row; ``token``, those of `group`
        consecutive rows in one column, where a row is the dimension with the least stride. A channel with much larger
        values then does not affect the scales of the remaining channels
    signs : ``keep`` gives an element that rounds to zero the smallest code of its sign, so that zeros, positive and
        negative elements stay apart; ``round`` does not; ``auto`` is ``keep`` in a store where backward decides by the
        sign of a tensor, as after ReLU, else ``round``

    Raises
    ------
    ConfigError : another group size; affine together with axis=token

    Notes
    -----
    dtypes: float32, float16, bfloat16. With ``m`` the largest finite magnitude of a group and
    ``s <= m / 127 * (1 + 2**-7)`` its scale, ``|x - decode(encode(x))| <= s / 2`` plus half a unit in the last place of
    the dtype; a group with ``m < 2**-110`` decodes to zeros. NaN and Inf decode to NaN and leave their group alone; a
    finite value never decodes to Inf; -0.0 decodes to +0.0.

    Affine: the same with ``m`` the finite minimum of a group, rounded down to bfloat16, and
    ``s <= (max - m) / 254 * (1 + 2**-7)``; a group of one bfloat16 number comes back exactly, one with
    ``max - m < 2**-80`` decodes to ``m``.

    With ``signs=keep`` the error of an element below half a step is at most ``s``; rounding by random bits is not
    unbiased there, and no group decodes to zeros but one of zeros. Affine groups with negative elements have a step up
    to about twice as large: their zero is a code.
    """

    name = "int8"

    group: int = 128
    affine: bool = False
    round: Literal["nearest", "stochastic", "dither"] = "nearest"
    axis: Literal["element", "token"] = "element"
    signs: Signs = "auto"

    @property
    def _flat(self) -> bool:
        return self.axis == "element"

    @property
    def kernel_name(self) -> str:
        return "affine" if self.affine else "int8_token" if self.axis == "token" else "int8"

    def _options(self) -> dict[str, Any]:
        options = {"round": self.round, **super()._options()}
        return {"bits": 8, **options} if self.affine else options

    def __post_init__(self) -> None:
        require_choice(self, "group", GROUPS)
        require_choice(self, "round", ROUNDINGS)
        require_choice(self, "axis", ("element", "token"))
        super().__post_init__()
        if self.affine and self.axis == "token":
            raise ConfigError(
                "int8(affine, axis=token) does not exist: the values of one channel over tokens are seldom of one "
                "sign. Leave out affine or axis.",
                axis=self.axis,
            )

    @property
    def _form(self) -> Format:
        return affine_format(8) if self.affine else Format((8,), (2,))

    def _fitted(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[KernelCodec, int]:
        """Fit groups to rows; of tokens only the rows matter, where a tensor has two dimensions."""
        if self.axis == "element":
            return super()._fitted(shape, stride)
        compact = layout_of(shape, stride).compact
        width = compact[0][-1] if compact and len(compact[0]) > 1 else 0
        return self, width if width > 1 else 0

    def _rows_nbytes(self, numel: int, width: int) -> int:
        if self.axis == "element":
            return super()._rows_nbytes(numel, width)
        return round_up(numel) + 2 * width * -(-numel // (width * self.group))
