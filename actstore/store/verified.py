"""Checks that bytes which wait are still those that were written."""

from __future__ import annotations

import torch

from actstore.base.checksum import checksum
from actstore.codecs.base import Bound
from actstore.errors import PayloadError
from actstore.kernels.base import LENGTH_NBYTES


class Seal:
    """Checksum of the bytes in `memory`, as `checksum` takes it."""

    __slots__ = ("_expected", "_nbytes")

    def __init__(self, memory: torch.Tensor) -> None:
        self._nbytes = memory.numel()
        self._expected = checksum(memory)

    def check(self, memory: torch.Tensor) -> None:
        """Compare the first bytes of `memory` with the checksum. The host waits for both.

        Raises
        ------
        PayloadError : they have changed
        """
        found = checksum(memory[: self._nbytes])
        if not torch.equal(found, self._expected):
            raise PayloadError(
                f"{self._nbytes} bytes came back with another checksum ({int(found)}) than they were encoded with "
                f"({int(self._expected)}): something wrote to them while they waited. Please report this with the "
                "policy and the devices, unless your own code or driver does so.",
                nbytes=self._nbytes,
            )


def verified(bound: Bound) -> Bound:
    """Return the same codec, which compares checksums on each decode. The host waits for them."""
    seals: list[Seal] = []

    def encode(src: torch.Tensor, out: torch.Tensor, key: int) -> int | None:
        used = bound.encode(src, out, key)
        nbytes = bound.nbytes if bound.exact else int(out[:LENGTH_NBYTES].view(torch.int64))
        seals[:] = [Seal(out[:nbytes])]
        return used

    def decode(buf: torch.Tensor, out: torch.Tensor, key: int) -> None:
        seals[0].check(buf)
        bound.decode(buf, out, key)

    return Bound(bound.nbytes, bound.exact, encode, decode)  # not `as_is`: the checksum reads all bytes
