"""bnb8: what the library gives for one block at a time; csrc/bnb8.md."""

from __future__ import annotations

import numpy as np
import torch

from actstore.codecs import Bnb8

VARIANTS = (Bnb8(),)


def encode(data: bytes, dtype: str) -> bytes:
    from bitsandbytes import functional

    values = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)) if data else torch.empty(0)
    codes, absmaxes = b"", b""
    for start in range(0, len(values), 256):
        block = values[start : start + 256]
        found, state = functional.quantize_blockwise(block, blocksize=256)
        codes += found.numpy().tobytes()
        absmaxes += np.float32(state.absmax.item() if block.isfinite().all() else np.nan).tobytes()
    return codes + bytes(-len(codes) % 16) + absmaxes


def decode(payload: bytes, numel: int, dtype: str) -> bytes:
    from bitsandbytes import functional

    data = b""
    for start in range(0, numel, 256):
        codes = np.frombuffer(payload, np.uint8, min(256, numel - start), start)
        absmax = np.frombuffer(payload, "<f4", 1, -(-numel // 16) * 16 + 4 * (start // 256))
        state = functional.QuantState(
            absmax=torch.tensor(absmax),
            code=functional.create_dynamic_map(),
            blocksize=256,
            dtype=getattr(torch, dtype),
        )
        found = functional.dequantize_blockwise(torch.tensor(codes), state)
        data += found.view(torch.uint8).numpy().tobytes()
    return data
