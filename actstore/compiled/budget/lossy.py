"""Modules of a compiled model whose saved tensors a plan may encode with a loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from actstore.codecs import Codec, Int8
from actstore.compiled.formats.sizes import hint
from actstore.kernels.rows import fit
from actstore.policy.options import codec_text
from actstore.policy.pattern import ancestry

SCALE_NBYTES = 2  # of a group


class LossyPayload(NamedTuple):
    """A payload that may stand for a saved tensor: the codec, the bytes of its sections, the modules that read the
    tensor, and the elements of the masks that forward saves because of the loss."""

    codec: Codec
    sizes: tuple[int, ...]
    modules: frozenset[str]
    decisions: int = 0


@dataclass(frozen=True)
class LossyModules:
    """The modules whose saved tensors may be encoded.

    Attributes
    ----------
    noise : variance that payloads of a module add to the gradients of the weights, as a fraction of their variance from
        batch to batch; None for a module that stays exact. Modules inside of one that has no entry of their own count
        to it. All numbers together are within the limit of the user
    codec : of the payloads
    """

    noise: Mapping[str, float | None]
    codec: Int8 = field(default_factory=Int8)

    @property
    def any(self) -> bool:
        """True where some module may lose."""
        return any(noise is not None for noise in self.noise.values())

    @property
    def identity(self) -> list[str]:
        """Texts that decide about the graphs: the codec, and which modules may lose or stay exact."""
        entries = (f"{name} {noise is not None}" for name, noise in sorted(self.noise.items()))
        return [codec_text(self.codec), *entries]

    def of(self, module: str) -> str | None:
        """Return the entry that a module counts to; None where its tensors stay exact."""
        entry = next((name for name in ancestry(module) if name in self.noise), None)
        return None if entry is None or self.noise[entry] is None else entry

    def noise_of(self, modules: Iterable[str]) -> float:
        """Return the variance that payloads of all of these modules add."""
        entries = {entry for module in modules if (entry := self.of(module)) is not None}
        return sum(self.noise[entry] or 0.0 for entry in entries)

    def sizes(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the bytes of the sections of a payload: codes and scales."""
        group, width = fit(tuple(map(hint, tensor.shape)), tuple(map(hint, tensor.stride())), self.codec.group)
        numel = hint(tensor.numel())
        groups = numel // width * -(-width // group) if width else -(-numel // group)
        return numel, SCALE_NBYTES * groups
