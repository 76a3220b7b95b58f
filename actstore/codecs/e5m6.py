"""e5m6: 12-bit floats. The format: csrc/e5m6.md."""

from __future__ import annotations

from dataclasses import dataclass

from actstore.codecs.dispatch import SignedCodec, Signs
from actstore.kernels.base import round_up


@dataclass(frozen=True)
class E5m6(SignedCodec):
    """Floats of 5 exponent and 6 mantissa bits: float16 without its last 4 bits, two elements in three bytes.

    Parameters
    ----------
    signs : ``keep`` keeps zeros, positive and negative elements apart, ``round`` does not; ``auto`` is ``keep`` in a
        store where backward decides by the sign of a tensor, as after ReLU, else ``round``

    Notes
    -----
    dtypes: float32, float16, bfloat16. 12 bits per element, no scale.
    ``|x - decode(encode(x))| <= max(|x| / 128, 2**-21)`` for ``|x| < 65280``; from there on a finite value becomes Inf,
    so that overflow shows. NaN, Inf and -0.0 stay what they are. With ``signs=keep`` magnitudes up to ``2**-21`` but
    zero become ``2**-20``.
    """

    name = "e5m6"

    signs: Signs = "auto"

    def _nbytes(self, numel: int, itemsize: int) -> int:
        return round_up(numel) + (numel + 1) // 2
