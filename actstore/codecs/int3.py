"""int3: affine 3-bit blocks. The format: csrc/affine.md."""

from __future__ import annotations

from dataclasses import dataclass

from actstore.codecs.affine import BlockCodec


@dataclass(frozen=True)
class Int3(BlockCodec):
    """Three bits per element, a bfloat16 scale and minimum per `group` consecutive elements in storage order.

    Parameters
    ----------
    group : elements that share a scale, a power of two from 32 to 256: 3 + 32 / `group` bits per element
    round : ``nearest``, ``stochastic`` (unbiased) or ``dither`` (unbiased, half the variance of stochastic, but a group
        that is not constant loses its exact zeros)
    signs : ``keep`` keeps zeros, positive and negative elements apart, ``round`` does not; ``auto`` is ``keep`` in a
        store where backward decides by the sign of a tensor, as behind ReLU, else ``round``

    Raises
    ------
    ConfigError : another group size

    Notes
    -----
    dtypes, errors and special values are those of `Int4`, with 7 in the place of 15: the scale is
    ``s <= (max - m) / 7 * (1 + 2**-7)``.
    """

    name = "int3"
    bits = 3
