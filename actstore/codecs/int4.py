"""int4: affine 4-bit blocks. The format: csrc/affine.md."""

from __future__ import annotations

from dataclasses import dataclass

from actstore.codecs.affine import BlockCodec


@dataclass(frozen=True)
class Int4(BlockCodec):
    """Four bits per element, a bfloat16 scale and minimum per `group` consecutive elements in storage order.

    Parameters
    ----------
    group : elements that share a scale, a power of two from 32 to 256: 4 + 32 / `group` bits per element
    round : ``nearest``, ``stochastic`` (unbiased) or ``dither`` (unbiased, half the variance of stochastic, but a group
        that is not constant loses its exact zeros)
    signs : ``keep`` keeps zeros, positive and negative elements apart, ``round`` does not; ``auto`` is ``keep`` in a
        store where backward decides by the sign of a tensor, as behind ReLU, else ``round``

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
