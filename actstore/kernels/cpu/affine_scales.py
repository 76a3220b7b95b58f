"""Scales and minima of affine blocks on the CPU. The bytes: csrc/affine.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from actstore.kernels.cpu.language import as_f32, as_u32, f32, inline, u32

SMALLEST_MINIMUM = u32(0x08800000)  # 2^-110
SMALLEST_QUARTER = f32(2.0**-82)
LARGEST_QUARTER = f32((2 - 2.0**-7) * 2.0**125)  # of the largest bfloat16
QUARTER = f32(0.25)

_i32 = np.int32


@inline
def _bf16_down(value: Any) -> Any:
    """Round down to bfloat16, and return the bits; the lowest number for values below it, 0 for tiny values."""
    word = as_u32(value)
    magnitude = u32(word & u32(0x7FFFFFFF))
    above = u32(min(u32(magnitude + u32(0xFFFF)), u32(0x7F7F0000)))
    bits = u32(u32(above | u32(0x80000000)) >> u32(16)) if word >= u32(0x80000000) else u32(word >> u32(16))
    return u32(0) if magnitude < SMALLEST_MINIMUM else bits


@inline
def scale_of(low: Any, high: Any, levels: Any) -> Any:
    """Return the bits of scale and minimum, a quarter of the minimum, and 4 / scale, or 0 in place of Inf."""
    minimum = _bf16_down(low)
    quarter = as_f32(u32(minimum << u32(16))) * QUARTER
    spread = high * QUARTER - quarter
    step = as_f32(u32(u32(as_u32(spread / f32(levels)) + u32(0xFFFF)) & u32(0xFFFF0000)))
    reciprocal = f32(1) / step
    scale = u32(as_u32(step * f32(4)) >> u32(16))
    constant = spread < SMALLEST_QUARTER
    return u32(0) if constant else scale, minimum, quarter, f32(0) if constant else reciprocal


@inline
def _up(value: Any) -> Any:
    """Round a finite float32 number of at least 0 up to bfloat16."""
    return as_f32(u32(u32(as_u32(value) + u32(0xFFFF)) & u32(0xFFFF0000)))


@inline
def scale_from_zero(high: Any, levels: Any) -> Any:
    """Return the bits of the scale of a group from 0 to `high`, and 4 / scale; both 0 where all is zero."""
    most = high * QUARTER
    step = SMALLEST_QUARTER if most < SMALLEST_QUARTER else _up(most / f32(levels))
    empty = _i32(as_u32(high)) <= _i32(0)  # as floats, LLVM would take a denormal for a zero where the processor does
    scale = u32(as_u32(step * f32(4)) >> u32(16))
    return u32(0) if empty else scale, f32(0) if empty else f32(1) / step


@inline
def away_from_zero(low: Any) -> Any:
    """Return 0 where the least element of a group, as an integer in the order of the values, is 0.0 or -0.0."""
    return u32(u32(low + _i32(1)) >> u32(1))


@inline
def _around_zero(low: Any, high: Any, levels: Any, bits: Any) -> Any:
    """Find a quarter of the smallest step with which a power of two is the code of zero, and that code.

    `low` and `high` are quarters of the bounds of the group.
    """
    low = max(low, -LARGEST_QUARTER)
    step, zero = f32(np.inf), _i32(1)
    for power in range(bits):
        code = f32(1 << power)
        found = max(_up(max(low * (f32(-1) / code), high / f32(levels - (1 << power)))), SMALLEST_QUARTER)
        better = found < step and found <= LARGEST_QUARTER / code
        step, zero = found if better else step, _i32(1 << power) if better else zero
    return step, zero


@inline
def keeping_scale_of(low: Any, high: Any, levels: Any, bits: Any) -> Any:
    """Return the same as `scale_of`, with signs kept, and the code of zero; -1 where zero is below all elements."""
    scale, minimum, quarter, reciprocal = scale_of(low, high, levels)
    word = as_u32(low)
    if word > u32(0x80000000):
        step, zero = _around_zero(low * QUARTER, high * QUARTER, levels, bits)
        quarter = -f32(zero) * step
        return (
            u32(as_u32(step * f32(4)) >> u32(16)),
            u32(as_u32(quarter * f32(4)) >> u32(16)),
            quarter,
            f32(1) / step,
            zero,
        )
    if minimum == u32(0) or quarter < as_f32(u32(scale << u32(16))) * QUARTER:
        scale, reciprocal = scale_from_zero(high, levels)
        return scale, u32(0), f32(0), reciprocal, _i32(0)
    return scale, minimum, quarter, reciprocal, _i32(-1)
