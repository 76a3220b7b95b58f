"""A codec that checks that its bytes are still those that it wrote."""

from __future__ import annotations

import torch

from actstore.base.checksum import checksum
from actstore.codecs.base import Bound
from actstore.errors import PayloadError
from actstore.kernels.base import LENGTH_NBYTES


def verified(bound: Bound) -> Bound:
    """Return the same codec, which compares checksums on each decode. The host waits for them."""
    sealed: list[tuple[int, torch.Tensor]] = []

    def encode(src: torch.Tensor, out: torch.Tensor, key: int) -> int | None:
        used = bound.encode(src, out, key)
        nbytes = bound.nbytes if bound.exact else int(out[:LENGTH_NBYTES].view(torch.int64))
        sealed[:] = [(nbytes, checksum(out[:nbytes]))]
        return used

    def decode(buf: torch.Tensor, out: torch.Tensor, key: int) -> None:
        nbytes, expected = sealed[0]
        found = checksum(buf[:nbytes])
        if not torch.equal(found, expected):
            raise PayloadError(
                f"{nbytes} bytes came back with another checksum ({int(found)}) than they were encoded with "
                f"({int(expected)}): something wrote to them while they waited. Please report this with the policy and "
                "the devices, unless your own code or driver does so.",
                nbytes=nbytes,
            )
        bound.decode(buf, out, key)

    return Bound(bound.nbytes, bound.exact, encode, decode)  # not `as_is`: the checksum reads all bytes
