"""zmask, topk and nm on the CPU. The bytes: csrc/sparse.md."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from actstore.errors import PayloadError
from actstore.kernels.base import Inner, Kernels, payload_pointer
from actstore.kernels.cpu.language import Parallel
from actstore.kernels.cpu.largest import compile_mark_groups, compile_mark_tiles
from actstore.kernels.cpu.tiles import check, compile_compact, compile_expand, compile_mark_nonzero, scan
from actstore.kernels.sparse import TILE, Rule, SparseSections, check_header

Run = Callable[[int, int, int, int, int, int], None]


@cache
def kernels(dtype: torch.dtype, device: torch.device, rule: Rule, inner: Inner) -> Kernels:
    """Return the kernels for one dtype and rule, around those of the inner codec; compiled at first use."""
    itemsize = dtype.itemsize
    mark, compact, expand = _mark(itemsize, rule.row if rule else 0), _compact(itemsize), _expand(itemsize)
    lossy = None if inner.name == "raw" else inner.kernels("cpu", dtype, device)

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> int:
        payload, source, head, tiles = (
            payload_pointer(out),
            src.data_ptr(),
            SparseSections.of(numel).inner,
            -(-numel // TILE),
        )
        keep, last = (rule.of(rule.row), rule.kept(numel % TILE)) if rule else (0, 0)
        mark(source, payload, numel, keep, last, tiles)
        scan(0, payload, numel, 0, 0, 0, tiles)
        header = _header(payload)
        count, used = header[1], 0
        if lossy is None:
            compact(source, payload + head, numel, 0, payload, tiles)
            used = count * itemsize
        elif count:
            values = torch.empty(count, dtype=dtype)
            compact(source, values.data_ptr(), numel, 0, payload, tiles)
            used = lossy.encode(values, out[head:], count, key)
            if used is None:
                used = inner._nbytes(count, itemsize)
        header[0] = head + used
        return head + used

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload, head, tiles = payload_pointer(buf), SparseSections.of(numel).inner, -(-numel // TILE)
        if buf.numel() < head:
            raise PayloadError(
                f"a sparse payload ends after {buf.numel()} bytes: must have {head} before its elements."
            )
        length, count = _header(payload)
        check_header(buf.numel(), (length, count), numel, itemsize, rule, inner)
        wrong = ctypes.c_int64(0)
        check(payload, ctypes.addressof(wrong), numel, 0, 0, 0, tiles)
        if wrong.value:
            raise PayloadError("a sparse payload was altered: its masks, starts and count contradict each other.")
        values = payload + head
        if lossy is not None and count:
            scratch = torch.empty(count, dtype=dtype)
            lossy.decode(buf[head:length], scratch, count, key)
            values = scratch.data_ptr()
        expand(values, out.data_ptr(), numel, 0, payload, tiles)

    return Kernels(encode, decode)


def _header(payload: int) -> ctypes.Array[ctypes.c_int64]:
    """View the header of a payload: its length and the number of its kept elements."""
    return (ctypes.c_int64 * 2).from_address(payload)


@cache
def _mark(itemsize: int, row: int) -> Run:
    if not row:
        return Parallel(compile_mark_nonzero(itemsize), TILE * itemsize)
    if row == TILE:
        return Parallel(compile_mark_tiles(itemsize), TILE * itemsize)
    return Parallel(compile_mark_groups(itemsize, row), TILE * itemsize)


@cache
def _compact(itemsize: int) -> Run:
    return Parallel(compile_compact(itemsize), TILE * itemsize)


@cache
def _expand(itemsize: int) -> Run:
    return Parallel(compile_expand(itemsize), TILE * itemsize)
