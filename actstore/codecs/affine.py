"""int2 to int6: affine blocks. The format: csrc/affine.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from actstore.codecs.checks import require_choice
from actstore.codecs.dispatch import Signs
from actstore.codecs.groups import GroupCodec
from actstore.codecs.int8 import ROUNDINGS
from actstore.errors import ConfigError
from actstore.kernels.affine import affine_format
from actstore.kernels.rows import Format

GROUPS = (32, 64, 128, 256)
UNBIASED = ROUNDINGS[1:]


class AffineCodec(GroupCodec):
    """Codes of `bits` bits, and a bfloat16 scale and minimum per `group` consecutive elements of a row."""

    bits: ClassVar[int]

    @property
    def kernel_name(self) -> str:
        return "affine"

    def __post_init__(self) -> None:
        require_choice(self, "group", GROUPS)
        require_choice(self, "round", ROUNDINGS)
        super().__post_init__()

    def _options(self) -> dict[str, Any]:
        return {"bits": self.bits, "round": self.round, **super()._options()}

    @property
    def _form(self) -> Format:
        return affine_format(self.bits)


@dataclass(frozen=True)
class BlockCodec(AffineCodec):
    """The options of `int3` to `int6`."""

    group: int = 32
    round: Literal["nearest", "stochastic", "dither"] = "nearest"
    signs: Signs = "auto"


@dataclass(frozen=True)
class Int2(AffineCodec):
    """Two bits per element, a bfloat16 scale and minimum per `group` consecutive elements of a row.

    Never for the inputs of norms, softmax and losses.

    Parameters
    ----------
    group : elements that share a scale, a power of two from 32 to 256: 2 + 32 / `group` bits per element
    round : ``stochastic`` or ``dither``; both are unbiased, dither has half the variance, but a group that is not
        constant loses its exact zeros
    signs : ``keep`` keeps zeros, positive and negative elements apart, ``round`` does not; ``auto`` is ``keep`` in a
        store where backward decides by the sign of a tensor, as after ReLU, else ``round``

    Raises
    ------
    ConfigError : another group size; rounding to nearest, which with four levels is biased

    Notes
    -----
    dtypes: float32, float16, bfloat16. With ``m`` the minimum of a group, rounded down to bfloat16, and
    ``s <= (max - m) / 3 * (1 + 2**-7)`` its scale, ``|x - decode(encode(x))| <= s`` (dither: ``s / 2``) plus about half
    a unit in the last place of the dtype; a group of one bfloat16 number comes back exactly. A group with NaN or Inf
    decodes to NaN; a finite value never decodes to Inf; a group with ``max - m < 2**-80`` decodes to ``m``.
    """

    name = "int2"
    bits = 2

    group: int = 32
    round: Literal["stochastic", "dither", "nearest"] = "stochastic"  # nearest: refused with the reason
    signs: Signs = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.round not in UNBIASED:
            raise ConfigError(
                f"int2(round={self.round}) does not exist: with four levels, the error of {self.round} rounding is as "
                f"large as the values and does not average out. Choose {' or '.join(UNBIASED)}, or int4.",
                round=self.round,
            )


@dataclass(frozen=True)
class Int3(BlockCodec):
    """Three bits per element, a bfloat16 scale and minimum per `group` consecutive elements of a row.

    Options, dtypes, errors and special values are those of `Int4`, with 7 in the place of 15: the scale is
    ``s <= (max - m) / 7 * (1 + 2**-7)``. An element takes 3 + 32 / `group` bits.
    """

    name = "int3"
    bits = 3


@dataclass(frozen=True)
class Int4(BlockCodec):
    """Four bits per element, a bfloat16 scale and minimum per `group` consecutive elements of a row.

    Parameters
    ----------
    group : elements that share a scale, a power of two from 32 to 256: 4 + 32 / `group` bits per element
    round : ``nearest``, ``stochastic`` (unbiased) or ``dither`` (unbiased, half the variance of stochastic, but a group
        that is not constant loses its exact zeros)
    signs : ``keep`` keeps zeros, positive and negative elements apart, ``round`` does not; ``auto`` is ``keep`` in a
        store where backward decides by the sign of a tensor, as after ReLU, else ``round``

    Raises
    ------
    ConfigError : another group size

    Notes
    -----
    dtypes: float32, float16, bfloat16. With ``m`` the minimum of a group, rounded down to bfloat16, and
    ``s <= (max - m) / 15 * (1 + 2**-7)`` its scale, ``|x - decode(encode(x))| <= s / 2`` (stochastic: ``s``) plus about
    half a unit in the last place of the dtype; a group of one bfloat16 number comes back exactly. A group with NaN or
    Inf decodes to NaN; a finite value never decodes to Inf; a group with ``max - m < 2**-80`` decodes to ``m``.

    With ``signs=keep`` zero is a code in each group with elements that are not positive. Elements of less than half a
    step come back with an error of ``s`` at most; rounding by random bits is not unbiased there. Groups with negative
    elements then have a step up to about twice as large.
    """

    name = "int4"
    bits = 4


@dataclass(frozen=True)
class Int5(BlockCodec):
    """Five bits per element, a bfloat16 scale and minimum per `group` consecutive elements of a row.

    Options, dtypes, errors and special values are those of `Int4`, with 31 in the place of 15: the scale is
    ``s <= (max - m) / 31 * (1 + 2**-7)``. An element takes 5 + 32 / `group` bits.
    """

    name = "int5"
    bits = 5


@dataclass(frozen=True)
class Int6(BlockCodec):
    """Six bits per element, a bfloat16 scale and minimum per `group` consecutive elements of a row.

    Options, dtypes, errors and special values are those of `Int4`, with 63 in the place of 15: the scale is
    ``s <= (max - m) / 63 * (1 + 2**-7)``. An element takes 6 + 32 / `group` bits.
    """

    name = "int6"
    bits = 6
