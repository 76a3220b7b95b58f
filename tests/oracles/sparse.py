"""What zmask, topk and nm share, one element after another; csrc/sparse.md in Python."""

from __future__ import annotations

import struct

from actstore.codecs import Codec
from tests.oracles import find

ITEMSIZE = {
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
}


def split(data: bytes, dtype: str) -> list[bytes]:
    """The bytes of each element."""
    size = ITEMSIZE[dtype]
    return [data[at : at + size] for at in range(0, len(data), size)]


def magnitude(element: bytes) -> int:
    """The bits of a float without its sign: finite < Inf < NaN."""
    return int.from_bytes(element, "little") & ((1 << (8 * len(element) - 1)) - 1)


def largest(elements: list[bytes], count: int) -> list[bool]:
    """Marks the `count` largest magnitudes; of equal ones the first."""
    order = sorted(range(len(elements)), key=lambda i: (-magnitude(elements[i]), i))
    chosen = set(order[:count])
    return [i in chosen for i in range(len(elements))]


def padded(section: bytes) -> bytes:
    return section + bytes(-len(section) % 16)


def encode(elements: list[bytes], kept: list[bool], dtype: str, inner: Codec, key: int) -> bytes:
    if not elements:
        return b""
    bits = sum(1 << i for i, keep in enumerate(kept) if keep)
    masks = bits.to_bytes(4 * -(-len(kept) // 32), "little")
    starts = [sum(kept[:tile]) for tile in range(0, len(kept), 1024)]
    values = b"".join(element for element, keep in zip(elements, kept, strict=True) if keep)
    body = padded(masks) + padded(struct.pack(f"<{len(starts)}Q", *starts)) + find.encode(inner, values, dtype, key)
    return struct.pack("<QQ", 16 + len(body), sum(kept)) + body


def decode(payload: bytes, numel: int, dtype: str, inner: Codec, key: int) -> bytes:
    if not numel:
        return b""
    count = struct.unpack_from("<Q", payload, 8)[0]
    bits = int.from_bytes(payload[16 : 16 + 4 * -(-numel // 32)], "little")
    masks, starts = -(-numel // 128) * 16, -(-numel // 2048) * 16
    values = iter(split(find.decode(inner, payload[16 + masks + starts :], count, dtype, key), dtype))
    zero = bytes(ITEMSIZE[dtype])
    return b"".join(next(values) if bits >> i & 1 else zero for i in range(numel))
