"""int2: affine 2-bit blocks. The format: csrc/affine.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actstore.codecs.affine import AffineCodec
from actstore.codecs.signs import Signs
from actstore.errors import ConfigError

ROUNDINGS = ("stochastic", "dither")


@dataclass(frozen=True)
class Int2(AffineCodec):
    """Two bits per element, a bfloat16 scale and minimum per `group` consecutive elements in storage order.

    Never for the inputs of norms, softmax and losses.

    Parameters
    ----------
    group : elements that share a scale, a power of two from 32 to 256: 2 + 32 / `group` bits per element
    round : ``stochastic`` or ``dither``; both are unbiased, dither has half the variance, but a group that is not
        constant loses its exact zeros
    signs : ``keep`` keeps zeros, positive and negative elements apart, ``round`` does not; ``auto`` is ``keep`` in a
        store where backward decides by the sign of a tensor, as behind ReLU, else ``round``

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
        if self.round not in ROUNDINGS:
            raise ConfigError(
                f"int2(round={self.round}) does not exist: with four levels, the error of {self.round} rounding is as "
                f"large as the values and does not average out; choose {' or '.join(ROUNDINGS)}, or int4",
                round=self.round,
            )
