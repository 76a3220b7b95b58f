"""Groups that end with rows, written for clarity: csrc/rows.md in NumPy. Rows are filled, and the fill is cut again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import numpy as np

from actstore.codecs import Codec, Fp8, Int8, Nf4
from tests.oracles import affine


def fit(sizes: tuple[int, ...], group: int) -> tuple[int, int]:
    """The length of groups, and of the rows that end them: 0 where groups of that length end with rows anyway."""
    width, outer = 1, list(sizes)
    while outer and width < 16:
        width *= outer.pop()
    if prod(outer) == 1:
        return group, 0
    fitting = [length for length in (32, 64, 128, 256, 512, 1024) if length <= group]
    dividing = [length for length in fitting if width % length == 0]
    if dividing:
        return dividing[-1], 0
    return min([length for length in fitting if length >= width], default=group), width


def planes(codec: Codec) -> tuple[int, ...]:
    """Bits of an element in each section of codes."""
    if isinstance(codec, Int8 | Fp8):
        return (8,)
    return (4,) if isinstance(codec, Nf4) else affine.PLANES[codec.bits]


def numbers(codec: Codec) -> int:
    """Sections with two bytes for each group."""
    return 1 if isinstance(codec, Fp8 | Nf4) or (isinstance(codec, Int8) and not codec.affine) else 2


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def encode(
    codec: Codec, data: bytes, dtype: str, sizes: tuple[int, ...], flat: Callable[[Codec, bytes], bytes]
) -> bytes:
    """The payload of a tensor with these sizes in storage order; `flat` encodes elements without rows."""
    group, width = fit(sizes, codec.group)
    fitted = replace(codec, group=group)
    if not width:
        return flat(fitted, data)
    rows = np.frombuffer(data, "<u4" if dtype == "float32" else "<u2").reshape(-1, width)
    fill = -width % group
    filled = np.concatenate([rows, np.repeat(rows[:, -1:], fill, 1)], 1)
    payload, sections = flat(fitted, filled.tobytes()), []
    for bits in planes(codec):
        bytes_, payload = split(payload, filled.size * bits // 8)
        each = np.unpackbits(np.frombuffer(bytes_, np.uint8), bitorder="little").reshape(len(rows), -1)
        sections.append(np.packbits(each[:, : width * bits], axis=1, bitorder="little").tobytes())
    for _ in range(numbers(codec)):
        bytes_, payload = split(payload, 2 * filled.size // group)
        sections.append(bytes_)
    return b"".join([*map(pad, sections[:-1]), sections[-1]])


def decode(
    codec: Codec,
    payload: bytes,
    numel: int,
    sizes: tuple[int, ...],
    itemsize: int,
    flat: Callable[[Codec, bytes, int], bytes],
) -> bytes:
    """The bytes of the elements that come back; `flat` decodes a payload of so many elements without rows."""
    group, width = fit(sizes, codec.group)
    fitted = replace(codec, group=group)
    if not width:
        return flat(fitted, payload, numel)
    rows, whole = numel // width, -(-width // group) * group
    sections = []
    for bits in planes(codec):
        bytes_, payload = split(payload, rows * -(-width * bits // 8))
        each = np.unpackbits(np.frombuffer(bytes_, np.uint8), bitorder="little").reshape(rows, -1)[:, : width * bits]
        filled = np.zeros((rows, whole * bits), np.uint8)
        filled[:, : width * bits] = each
        sections.append(np.packbits(filled, bitorder="little").tobytes())
    for _ in range(numbers(codec)):
        bytes_, payload = split(payload, 2 * rows * whole // group)
        sections.append(bytes_)
    back = flat(fitted, b"".join([*map(pad, sections[:-1]), sections[-1]]), rows * whole)
    return np.frombuffer(back, f"V{itemsize}").reshape(rows, whole)[:, :width].tobytes()


def split(payload: bytes, length: int) -> tuple[bytes, bytes]:
    """A section of so many bytes, and what follows its padding."""
    return payload[:length], payload[-(-length // 16) * 16 :]
