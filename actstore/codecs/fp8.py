"""fp8: blocks of 8-bit floats, e4m3. The format: csrc/fp8.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from actstore.codecs.checks import require_choice
from actstore.codecs.dispatch import Signs
from actstore.codecs.groups import GroupCodec
from actstore.codecs.int8 import GROUPS
from actstore.kernels.rows import Format


@dataclass(frozen=True)
class Fp8(GroupCodec):
    """One e4m3 float per element and one bfloat16 scale per `group` consecutive elements of a row.

    Parameters
    ----------
    group : elements that share a scale, a power of two from 32 to 1024: 8 + 16 / `group` bits per element
    scale : ``linear`` maps the largest magnitude of a group to 448, the largest e4m3 value; ``pow2`` takes the next
        power of two above, so that scaling changes no mantissa
    round : ``nearest``, or ``stochastic``: unbiased, by random bits
    signs : ``keep`` keeps zeros, positive and negative elements apart, ``round`` does not; ``auto`` is ``keep`` in a
        store where backward decides by the sign of a tensor, as after ReLU, else ``round``

    Raises
    ------
    ConfigError : another group size, scale or rounding

    Notes
    -----
    dtypes: float32, float16, bfloat16. With ``s`` the scale of a group, at most ``m / 448 * (1 + 2**-7)`` (``pow2``:
    ``m / 224``) for its largest finite magnitude ``m``, ``|x - decode(encode(x))| <= max(|x| / 16, s / 1024)``, twice
    that for ``stochastic``, plus half a unit in the last place of the dtype; a group with ``m < 2**-98`` decodes to
    zeros. NaN and Inf decode to NaN and leave their group alone; a finite value never decodes to Inf; -0.0 stays -0.0.
    With ``signs=keep`` elements that would decode to zero become ``s / 512``, also in groups with ``m < 2**-98``.
    """

    name = "fp8"

    group: int = 128
    scale: Literal["linear", "pow2"] = "linear"
    round: Literal["nearest", "stochastic"] = "nearest"
    signs: Signs = "auto"

    def __post_init__(self) -> None:
        require_choice(self, "group", GROUPS)
        require_choice(self, "scale", ("linear", "pow2"))
        require_choice(self, "round", ("nearest", "stochastic"))
        super().__post_init__()

    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale, "round": self.round, **super()._options()}

    @property
    def _form(self) -> Format:
        return Format((8,), (2,))
