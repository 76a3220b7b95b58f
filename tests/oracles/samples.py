"""Elements that codecs of floats must survive, as bytes in storage order."""

from __future__ import annotations

import numpy as np
import torch

DTYPES = ("float32", "float16", "bfloat16")  # that every codec of floats takes
EVERY_DTYPE = (*DTYPES, "float64", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64")
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
SUFFIX = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

# bits of: zeros, ones, least and largest denormals, least normal, largest finite, Inf, quiet and signalling NaN
SPECIAL = {
    "float32": (0, 0x3F800000, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001),
    "float16": (0, 0x3C00, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7E00, 0x7C01),
    "bfloat16": (0, 0x3F80, 1, 0x7F, 0x80, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81),
}


def to_bytes(values: object, dtype: str) -> bytes:
    """Real numbers, cut to the dtype."""
    with np.errstate(over="ignore"):
        single = np.asarray(values, np.float64).astype(np.float32)
        if dtype == "bfloat16":
            return (single.view(np.uint32) >> 16).astype("<u2").tobytes()
        return single.astype({"float32": "<f4", "float16": "<f2"}[dtype]).tobytes()


def random_bits(numel: int, dtype: str, seed: int) -> bytes:
    """Values around one with, in most groups, none, and in some a few special elements of either sign."""
    rng = np.random.default_rng(seed)
    itemsize = ITEMSIZE[dtype]
    bits = np.frombuffer(to_bytes(rng.standard_normal(numel) * 4, dtype), f"<u{itemsize}").copy()
    special = np.array(SPECIAL[dtype], bits.dtype)
    special = np.concatenate([special, special | bits.dtype.type(1 << (8 * itemsize - 1))])
    for _ in range(numel // 150 + seed % 2):
        bits[rng.integers(numel)] = rng.choice(special)
    return bits.tobytes()


def almost_ties() -> np.ndarray:
    """A one, and elements whose product with 1 / scale is half way between two codes only after it was rounded.

    Rounding the product and the sum at once, as a fused multiply-add does, gives other codes.
    """
    scale = np.uint32(0x3C020000).view(np.float32)
    reciprocal = np.float32(1) / scale
    half = np.arange(32, 126, dtype=np.float32) + np.float32(0.5)
    steps = np.arange(-4, 5, dtype=np.int32)
    near = ((half * scale).view(np.int32)[:, None] + steps).view(np.float32)
    exact = near.astype(np.float64) * np.float64(reciprocal)
    chosen = (near * reciprocal == half[:, None]) & (np.rint(exact) != np.rint(half)[:, None])
    return np.concatenate([np.ones(1, np.float32), near[chosen]])


def behind_relu(rng: np.random.Generator) -> np.ndarray:
    """Blocks of 64 elements of one magnitude each, half of them zero, and many so small that they round to zero."""
    magnitudes = 2.0 ** rng.integers(-150, 127, (48, 1)) * (rng.random((48, 64)) ** 8)
    return np.maximum(rng.choice([-1, 1], (48, 64)) * magnitudes, 0).ravel()


def samples(dtype: str) -> dict[str, bytes]:
    """Named cases of a few groups each."""
    rng = np.random.default_rng(0)
    itemsize = ITEMSIZE[dtype]
    unsigned = np.dtype(f"<u{itemsize}")
    sign = unsigned.type(1 << (8 * itemsize - 1))
    zero, one, least, denormal, normal, largest, inf, nan, signalling = np.array(SPECIAL[dtype], unsigned)

    def bits(*patterns: object, repeat: int = 1) -> bytes:
        return np.array(patterns * repeat, unsigned).tobytes()

    threshold = np.float64(2.0**-110)
    ties = np.concatenate([[127.0], np.arange(-126.5, 127.5)])  # with scale 1, every code lies half way
    return {
        "zeros": bits(zero, repeat=200),
        "negative zeros": bits(zero | sign, repeat=200),
        "ones": bits(one, repeat=200),
        "one of many": bits(*[zero] * 130, one | sign, *[zero] * 60),
        "largest": bits(largest, largest | sign, one, repeat=80),
        "denormals": bits(least, denormal, denormal | sign, repeat=80),
        "denormals and a one": bits(least, denormal, one, normal, repeat=80),
        "least normal": bits(normal, normal | sign, repeat=80),
        "infinite": bits(inf, inf | sign, repeat=80),
        "not a number": bits(nan, signalling, nan | sign, signalling | sign, repeat=40),
        "one infinite": bits(*[one] * 50, inf, *[one | sign] * 150),
        "one NaN in zeros": bits(*[zero] * 50, nan, *[zero] * 150),
        "one NaN in the largest": bits(*[largest] * 50, signalling | sign, *[largest] * 150),
        "around the threshold": to_bytes(
            np.repeat([threshold * (1 - 2.0**-8), threshold, threshold * 1.5, -threshold], 128), dtype
        ),
        "ties": to_bytes(ties, dtype),
        "almost ties": to_bytes(almost_ties()[:128], dtype),
        "steps": to_bytes(np.linspace(-3, 3, 500), dtype),
        "powers": to_bytes(np.sign(rng.standard_normal(600)) * 2.0 ** rng.integers(-148, 128, 600), dtype),
        "groups of every size": to_bytes(rng.standard_normal((40, 128)) * 2.0 ** rng.integers(-20, 16, (40, 1)), dtype),
        "any bits": rng.integers(0, 1 << 8, 3000 * itemsize, dtype=np.uint8).tobytes(),
        "behind ReLU": to_bytes(behind_relu(rng), dtype),
        "behind ReLU, with its zeros negative": to_bytes(np.where(behind_relu(rng) == 0, -0.0, 1), dtype),
    }


def every_code_and_scale() -> bytes:
    """An int8 payload, groups of 32: all codes, under scales over the range of normal numbers, up to the largest."""
    codes = np.repeat(np.arange(256, dtype=np.uint8).reshape(8, 32), 32, axis=0)
    exponents = np.linspace(1, 254, 32).astype(np.uint16)
    scales = np.tile(exponents << 7 | 0x7F, 8).astype("<u2")
    return codes.tobytes() + scales.tobytes()


def elements(kind: str, dtype: str, numel: int) -> torch.Tensor:
    """Elements of any dtype: ``normal`` ones (small integers, about the half of bools) or all ``special`` ones."""
    rng = np.random.default_rng([numel, kind == "special", EVERY_DTYPE.index(dtype)])
    kind_of = getattr(torch, dtype)
    if not numel:
        return torch.empty(0, dtype=kind_of)
    if kind_of is torch.bool:
        return torch.tensor(rng.integers(2, size=numel) * (kind == "normal"), dtype=kind_of)
    if dtype in DTYPES:
        itemsize = ITEMSIZE[dtype]
        if kind == "normal":
            return torch.frombuffer(bytearray(to_bytes(rng.standard_normal(numel) * 4, dtype)), dtype=kind_of)
        special = np.array(SPECIAL[dtype], f"<u{itemsize}")
        special = np.concatenate([special, special | special.dtype.type(1 << (8 * itemsize - 1))])
        return torch.frombuffer(bytearray(rng.choice(special, numel).tobytes()), dtype=kind_of)
    if kind == "special":
        data = rng.integers(0, 256, numel * kind_of.itemsize, dtype=np.uint8).tobytes()
        return torch.frombuffer(bytearray(data), dtype=kind_of)
    if kind_of.is_floating_point or kind_of.is_complex:
        return torch.tensor(rng.standard_normal(numel), dtype=kind_of)
    return torch.tensor(rng.integers(3, 100, numel), dtype=kind_of)
