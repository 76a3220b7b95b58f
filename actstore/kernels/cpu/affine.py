"""Affine blocks on the CPU, a tile at a time. The bytes: csrc/affine.md."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from actstore.kernels.affine import LEVELS, widths
from actstore.kernels.base import Kernels
from actstore.kernels.cpu.affine_planes import PADDING_NUMEL, pack, padded, section, unpack
from actstore.kernels.cpu.affine_tiles import (
    TILE,
    codes_stack,
    copy_filled,
    decode_groups,
    elements_stack,
    encode_groups,
    groups_stack,
)
from actstore.kernels.cpu.language import (
    BF16,
    F32,
    INF_BF16,
    INF_F16,
    INF_F32,
    KINDS,
    Parallel,
    in_units,
    kernel,
    put,
    u8_at,
)
from actstore.kernels.cpu.philox import draw_noise, noise_stack
from actstore.kernels.cpu.rows import clear, gather, run_of, scatter, with_rows


@cache
def kernels(
    dtype: torch.dtype,
    device: torch.device,
    bits: int,
    group: int,
    round: str,  # noqa: A002
    keep: bool,
) -> Kernels:
    """Return the kernels for one dtype and set of options; compiled at first use, then read from numba's disk cache."""
    unit_nbytes = TILE * dtype.itemsize
    run_encode = Parallel(_compile_encode(KINDS[dtype], bits, group, round != "nearest", keep), unit_nbytes)
    run_decode = Parallel(
        _compile_decode(KINDS[dtype], bits, group, round == "dither", keep and round == "dither"), unit_nbytes
    )

    def compiled_rows() -> tuple[Parallel, Parallel]:
        noisy, dither = round != "nearest", round == "dither"
        return (
            Parallel(_compile_encode_rows(KINDS[dtype], bits, group, noisy, keep), unit_nbytes),
            Parallel(_compile_decode_rows(KINDS[dtype], bits, group, dither, keep and dither), unit_nbytes),
        )

    return with_rows(in_units(run_encode, run_decode, TILE), compiled_rows, group, TILE)


def _compile_encode(kind: int, bits: int, group: int, noisy: bool, keep: bool) -> Any:
    inf = int(INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16)
    itemsize, levels, (low_bits, high_bits) = 4 if kind == F32 else 2, LEVELS[bits], widths(bits)

    @kernel
    def encode(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        noise = noise_stack() if noisy else 0
        lows, highs, finites = groups_stack(), groups_stack(), groups_stack()
        quarters, reciprocals, zeros = groups_stack(), groups_stack(), groups_stack()
        stacks = (lows, highs, finites, quarters, reciprocals, zeros)
        copy, bytes_ = elements_stack(), codes_stack()
        upper = payload + section(numel * low_bits)
        scales = upper + section(numel * high_bits)
        minima = scales + section(16 * -(-numel // group))
        for tile in range(first, last):
            elements, lower = source + tile * TILE * itemsize, payload + tile * (TILE * low_bits // 8)
            count = min(TILE, numel - tile * TILE)
            groups = -(-count // group)
            if noisy:
                draw_noise(noise, tile * TILE, key)
            if count < TILE:
                copy_filled(elements, copy, count, groups * group, kind)
                elements = copy

            codes = lower if bits == 8 and count == TILE else bytes_
            scales_at, minima_at = scales + tile * (TILE // group * 2), minima + tile * (TILE // group * 2)
            encode_groups(
                elements,
                codes,
                stacks,
                scales_at,
                minima_at,
                noise,
                groups,
                group,
                kind,
                inf,
                levels,
                bits,
                noisy,
                keep,
            )
            if bits < 8 or count < TILE:
                for i in range(count, -(-count // PADDING_NUMEL) * PADDING_NUMEL):
                    put(u8_at(codes), i, np.uint8(0))
                pack(codes, lower, padded(count, low_bits), 0, low_bits)
                if high_bits:
                    above = upper + tile * (TILE * high_bits // 8)
                    pack(codes, above, padded(count, high_bits), low_bits, high_bits)
            if tile * TILE + count == numel:
                for i in range(2 * -(-numel // group), minima - scales):
                    put(u8_at(scales), i, np.uint8(0))

    return encode


def _compile_decode(kind: int, bits: int, group: int, dither: bool, keep: bool) -> Any:
    itemsize, (low_bits, high_bits) = 4 if kind == F32 else 2, widths(bits)

    @kernel
    def decode(payload: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        noise = noise_stack() if dither else 0
        copy, bytes_ = elements_stack(), codes_stack()
        upper = payload + section(numel * low_bits)
        scales = upper + section(numel * high_bits)
        minima = scales + section(16 * -(-numel // group))
        for tile in range(first, last):
            elements, lower = target + tile * TILE * itemsize, payload + tile * (TILE * low_bits // 8)
            count = min(TILE, numel - tile * TILE)
            groups = -(-count // group)
            if dither:
                draw_noise(noise, tile * TILE, key)
            if count < TILE:
                elements = copy
            codes = lower if bits == 8 and count == TILE else bytes_
            if bits < 8 or count < TILE:
                unpack(lower, codes, padded(count, low_bits), 0, low_bits)
                if high_bits:
                    above = upper + tile * (TILE * high_bits // 8)
                    unpack(above, codes, padded(count, high_bits), low_bits, high_bits)
            scales_at, minima_at = scales + tile * (TILE // group * 2), minima + tile * (TILE // group * 2)
            decode_groups(codes, scales_at, minima_at, elements, noise, groups, group, kind, bits, dither, keep)
            if count < TILE:
                copy_filled(copy, target + tile * TILE * itemsize, count, count, kind)

    return decode


def _compile_encode_rows(kind: int, bits: int, group: int, noisy: bool, keep: bool) -> Any:
    inf = int(INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16)
    levels, (low_bits, high_bits) = LEVELS[bits], widths(bits)

    @kernel
    def encode(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        noise = noise_stack() if noisy else 0
        lows, highs, finites = groups_stack(), groups_stack(), groups_stack()
        quarters, reciprocals, zeros = groups_stack(), groups_stack(), groups_stack()
        stacks = (lows, highs, finites, quarters, reciprocals, zeros)
        elements, codes = elements_stack(), codes_stack()
        width = extra >> 24
        rows, parts = numel // width, -(-width // group)
        low_nbytes, high_nbytes = (width * low_bits + 7) // 8, (width * high_bits + 7) // 8
        upper = payload + section(8 * rows * low_nbytes)
        scales = upper + section(8 * rows * high_nbytes)
        minima = scales + section(16 * rows * parts)
        for tile in range(first, last):
            start = tile * (TILE // group)
            groups = min(TILE // group, rows * parts - start)
            if noisy:
                draw_noise(noise, tile * TILE, key)
            gather(source, elements, start, start + groups, extra, group, kind)
            encode_groups(
                elements, codes, stacks, scales + 2 * start, minima + 2 * start, noise, groups, group, kind, inf,
                levels, bits, noisy, keep,
            )  # fmt: skip
            index = start
            while index < start + groups:
                row, at, count, passed = run_of(index, start + groups, extra, group)
                each = codes + (index - start) * group
                lower, above = payload + row * low_nbytes, upper + row * high_nbytes
                clear(each + count, -count & 7)
                most = (count * low_bits + 7) // 8 * (8 // low_bits)
                pack(each, lower + at * low_bits // 8, most, 0, low_bits)
                if high_bits:
                    most = (count * high_bits + 7) // 8 * (8 // high_bits)
                    pack(each, above + at * high_bits // 8, most, low_bits, high_bits)
                index += passed
            if start + groups == rows * parts:
                clear(payload + rows * low_nbytes, upper - payload - rows * low_nbytes)
                clear(upper + rows * high_nbytes, scales - upper - rows * high_nbytes)
                clear(scales + 2 * rows * parts, minima - scales - 2 * rows * parts)

    return encode


def _compile_decode_rows(kind: int, bits: int, group: int, dither: bool, keep: bool) -> Any:
    low_bits, high_bits = widths(bits)

    @kernel
    def decode(payload: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        noise = noise_stack() if dither else 0
        elements, codes = elements_stack(), codes_stack()
        width = extra >> 24
        rows, parts = numel // width, -(-width // group)
        low_nbytes, high_nbytes = (width * low_bits + 7) // 8, (width * high_bits + 7) // 8
        upper = payload + section(8 * rows * low_nbytes)
        scales = upper + section(8 * rows * high_nbytes)
        minima = scales + section(16 * rows * parts)
        for tile in range(first, last):
            start = tile * (TILE // group)
            groups = min(TILE // group, rows * parts - start)
            if dither:
                draw_noise(noise, tile * TILE, key)
            index = start
            while index < start + groups:
                row, at, count, passed = run_of(index, start + groups, extra, group)
                each = codes + (index - start) * group
                lower, above = payload + row * low_nbytes, upper + row * high_nbytes
                most = (count * low_bits + 7) // 8 * (8 // low_bits)
                unpack(lower + at * low_bits // 8, each, most, 0, low_bits)
                if high_bits:
                    most = (count * high_bits + 7) // 8 * (8 // high_bits)
                    unpack(above + at * high_bits // 8, each, most, low_bits, high_bits)
                index += passed
            decode_groups(
                codes, scales + 2 * start, minima + 2 * start, elements, noise, groups, group, kind, bits, dither, keep
            )
            scatter(elements, target, start, start + groups, extra, group, kind)

    return decode
