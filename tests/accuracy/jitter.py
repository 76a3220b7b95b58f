"""Codecs with errors that are known: noise of a size, or a shrinkage."""

from dataclasses import dataclass

import torch
from torch import Tensor

from actstore.codecs import Raw
from actstore.codecs.base import Bound


@dataclass(frozen=True)
class Jitter(Raw):
    """Gives back (x + noise rms(x) e) times gain, with e standard normal and another one for each key."""

    name = "jitter"
    kernel_name = "raw"
    noise: float = 0.1
    gain: float = 1.0

    @property
    def lossless(self) -> bool:
        return False

    @property
    def keeping_signs(self) -> "Jitter":
        return self  # noise everywhere is what its tests are about

    @property
    def keyed(self) -> bool:
        return True

    def _options(self) -> dict[str, object]:
        return {}  # of the kernels, which are those of raw

    def bind(self, src: Tensor) -> Bound:
        bound = super().bind(src)

        def decode(buf: Tensor, out: Tensor, key: int) -> None:
            bound.decode(buf, out, key)
            e = torch.randn(out.shape, generator=torch.Generator().manual_seed(key))
            out.add_(e, alpha=self.noise * float(out.square().mean().sqrt())).mul_(self.gain)

        return Bound(bound.nbytes, bound.exact, bound.encode, decode)
