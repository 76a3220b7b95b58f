"""zstd and lz4: the frames of csrc/blosc.md, each compressed by the library itself."""

from __future__ import annotations

import numpy as np

from actstore.codecs import Codec, Raw
from tests.oracles import find

FRAME = 64 << 20


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def encode(
    name: str, data: bytes, dtype: str, inner: Codec, level: int, shuffle: str, key: int, sizes: find.Sizes
) -> bytes:
    if not data:
        return b""
    import blosc2

    content = find.encode(inner, data, dtype, key, sizes)
    frames = [content[start : start + FRAME] for start in range(0, len(content), FRAME)]
    stored = []
    for frame in frames:
        chunk = blosc2.compress2(
            frame,
            codec={"zstd": blosc2.Codec.ZSTD, "lz4": blosc2.Codec.LZ4}[name],
            clevel=level,
            typesize=itemsize(dtype) if isinstance(inner, Raw) else 1,
            nthreads=1,
            filters=[
                {"byte": blosc2.Filter.SHUFFLE, "bit": blosc2.Filter.BITSHUFFLE, "none": blosc2.Filter.NOFILTER}[
                    shuffle
                ]
            ],
            filters_meta=[0],
        )
        stored.append(min(frame, chunk, key=len))
    table = pad(b"".join(len(each).to_bytes(8, "little") for each in stored))
    body = table + b"".join(map(pad, stored))
    return (16 + len(body)).to_bytes(8, "little") + len(content).to_bytes(8, "little") + body


def decode(payload: bytes, numel: int, dtype: str, inner: Codec, key: int, sizes: find.Sizes) -> bytes:
    if not payload:
        return b""
    import blosc2

    held = int.from_bytes(payload[8:16], "little")
    counts = [min(FRAME, held - start) for start in range(0, held, FRAME)]
    lengths = np.frombuffer(payload, "<u8", len(counts), 16).tolist()
    at, content = 16 + -(-8 * len(counts) // 16) * 16, b""
    for count, size in zip(counts, lengths, strict=True):
        stored = payload[at : at + size]
        content += stored if size == count else blosc2.decompress2(stored)
        at += -(-size // 16) * 16
    return find.decode(inner, content, numel, dtype, key, sizes)


def itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
