"""zstd: Zstandard, through blosc2. The format: csrc/blosc.md."""

from __future__ import annotations

from dataclasses import dataclass

from actstore.codecs.blosc import BloscCodec


@dataclass(frozen=True)
class Zstd(BloscCodec):
    """Zstandard: smaller payloads than `lz4`, for disks and for hosts that are short of memory. See `BloscCodec`."""

    name = "zstd"
