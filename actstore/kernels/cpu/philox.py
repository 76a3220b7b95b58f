"""Random bytes by position and key on the CPU: Philox4x32-10. The numbers: csrc/philox.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from actstore.kernels.cpu.language import f32, get, inline, put, stack_of, u8_at, u32, u32_at

NOISE_NUMEL = 1024  # elements in one draw of noise: a multiple of every group
noise_stack: Any = stack_of(NOISE_NUMEL)

_u64 = np.uint64


@inline
def _round(a: Any, b: Any, c: Any, d: Any, low: Any, high: Any) -> Any:
    first, second = _u64(a) * _u64(0xD2511F53), _u64(c) * _u64(0xCD9E8D57)
    return (
        u32(u32(second >> _u64(32)) ^ b ^ low),
        u32(second),
        u32(u32(first >> _u64(32)) ^ d ^ high),
        u32(first),
    )


@inline
def philox(block: Any, purpose: Any, key: Any) -> Any:
    """Compute four random words for counter (`block`, `purpose`) under a 63-bit key."""
    a, b, c, d = u32(_u64(block)), u32(_u64(block) >> _u64(32)), u32(purpose), u32(0)
    low, high = u32(_u64(key)), u32(_u64(key) >> _u64(32))
    for _ in range(10):
        a, b, c, d = _round(a, b, c, d, low, high)
        low, high = u32(low + u32(0x9E3779B9)), u32(high + u32(0xBB67AE85))
    return a, b, c, d


@inline
def draw_noise(noise: Any, start: Any, key: Any) -> None:
    """Fill `noise` with the random bytes of elements `start` to `start + NOISE_NUMEL`; `start` is a multiple of 16."""
    words = u32_at(noise)
    for block in range(NOISE_NUMEL // 16):
        a, b, c, d = philox(start // 16 + block, 0, key)
        put(words, 4 * block, a)
        put(words, 4 * block + 1, b)
        put(words, 4 * block + 2, c)
        put(words, 4 * block + 3, d)


@inline
def noise_of(noise: Any, index: Any, first: Any, group: Any, key: Any) -> Any:
    """Return the address of the noise of group `index`, drawn where a loop over groups from `first` on needs it.

    A short group has the noise of a whole one.
    """
    start = index * group
    if index == first or start % NOISE_NUMEL == 0:
        draw_noise(noise, start - start % NOISE_NUMEL, key)
    return noise + start % NOISE_NUMEL


@inline
def offset(noise: Any, index: Any) -> Any:
    """Return the noise of element `index`, in (-1/2, 1/2): ``(byte + 1/2) / 256 - 1/2``, exact in float32."""
    return f32(get(u8_at(noise), index)) * f32(2.0**-8) - f32(0.498046875)
