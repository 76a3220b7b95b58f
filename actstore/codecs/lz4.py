"""lz4: LZ4, through blosc2. The format: csrc/blosc.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actstore.codecs.blosc import BloscCodec


@dataclass(frozen=True)
class Lz4(BloscCodec):
    """LZ4: faster than `zstd`; it finds repeated bytes only, so that `shuffle` is by bits. See `BloscCodec`."""

    name = "lz4"

    shuffle: Literal["byte", "bit", "none"] = "bit"
