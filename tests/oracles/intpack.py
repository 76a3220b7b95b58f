"""intpack, written for clarity, one tile at a time; csrc/intpack.md in NumPy.

Elements come and go as bytes in storage order; `dtype` is the name of an integer dtype or "bool".
"""

from __future__ import annotations

import numpy as np

from actstore.codecs import Intpack
from tests.oracles.planes import PLANE_NBYTES, TILE, pack, unpack

VARIANTS = (Intpack(),)


def numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype("u1" if dtype == "bool" else dtype).newbyteorder("<")


def encode(data: bytes, dtype: str) -> bytes:
    elements = np.frombuffer(data, numpy_dtype(dtype)).tolist()
    if not elements:
        return b""
    descriptors, parts = b"", b""
    for start in range(0, len(elements), TILE):
        tile = elements[start : start + TILE]
        least = min(tile)
        width = (max(tile) - least).bit_length()
        descriptors += least.to_bytes(8, "little", signed=True)
        descriptors += (width | len(parts) // 16 << 8).to_bytes(8, "little")
        parts += pack(np.array([element - least for element in tile], np.uint64), width)
    length = 16 + len(descriptors) + len(parts)
    return length.to_bytes(8, "little") + len(elements).to_bytes(8, "little") + descriptors + parts


def decode(payload: bytes, numel: int, dtype: str) -> bytes:
    tiles = -(-numel // TILE)
    elements = []
    for tile in range(tiles):
        at = 16 + 16 * tile
        least = int.from_bytes(payload[at : at + 8], "little", signed=True)
        place = int.from_bytes(payload[at + 8 : at + 16], "little")
        width, offset = place & 255, 16 * (place >> 8)
        part = payload[16 + 16 * tiles + offset :][: width * PLANE_NBYTES]
        elements += [least + code for code in unpack(part, width).tolist()]
    return np.array(elements[:numel], np.int64).astype(numpy_dtype(dtype)).tobytes()
