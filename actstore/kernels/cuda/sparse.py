"""zmask, topk and nm on CUDA devices: csrc/sparse.cu."""

from __future__ import annotations

from collections.abc import Callable

import torch

from actstore.kernels.base import Inner, Kernels, aligned
from actstore.kernels.cuda import launch
from actstore.kernels.cuda.launch import tile_blocks
from actstore.kernels.sparse import PERIOD, TILE, Growth, Largest, Rule, SparseSections

SCAN_TILES = 2048  # tiles that one block scans, in csrc/sparse.cu

Encode = Callable[[torch.Tensor, torch.Tensor, int, int], None]


def sparse(dtype: torch.dtype, device: torch.device, rule: Rule, inner: Inner) -> Kernels:
    """Return the kernels for one dtype and rule on one device, around those of the inner codec."""
    lossy = None if inner.name == "raw" else inner.kernels("cuda", dtype, device)
    expand = launch.launcher("sparse", f"sparse_expand_{dtype.itemsize}", device)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        header, masks, starts, values = _sections(aligned(buf), numel)
        if lossy is not None:
            payload, values = values, _scratch(rule, numel, dtype, device)
            lossy.decode(payload, values, len(values), key, count=_count(header) if rule is None else None)
        expand(tile_blocks(numel), masks, starts, values, out, numel)

    if rule is None:
        return Kernels(_encode_nonzero(dtype, device, inner, lossy), decode)
    return Kernels(_encode_largest(dtype, device, rule, inner, lossy), decode)


def _encode_nonzero(dtype: torch.dtype, device: torch.device, inner: Inner, lossy: Kernels | None) -> Encode:
    mark, compact = (
        launch.launcher("sparse", f"sparse_{name}_{dtype.itemsize}", device) for name in ("mark", "compact")
    )
    scan, measure = (launch.launcher("sparse", f"sparse_{name}", device) for name in ("scan", "length"))
    growth = Growth.of(lambda numel: inner._nbytes(numel, dtype.itemsize)) if inner.exact else Growth(0, [])
    table = torch.tensor(growth.table, dtype=torch.int32, device=device) if inner.exact else None

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        header, masks, starts, payload = _sections(aligned(out), numel)
        blocks, tiles = tile_blocks(numel), -(-numel // TILE)
        parts = -(-tiles // SCAN_TILES)
        before = torch.empty(parts, dtype=torch.int64, device=device)
        mark(blocks, src, masks, starts, numel)
        scan(parts, starts, before, tiles, SCAN_TILES)
        scan(1, before, header[8:], parts, parts)
        values = payload if lossy is None else _scratch(None, numel, dtype, device)
        compact(blocks, src, masks, starts, before, values, numel)
        if lossy is not None:
            lossy.encode(values, payload, numel, key, count=_count(header))
        measure(1, header, payload, table, SparseSections.of(numel).inner, PERIOD, growth.step)

    return encode


def _encode_largest(
    dtype: torch.dtype, device: torch.device, rule: Largest, inner: Inner, lossy: Kernels | None
) -> Encode:
    name = "top" if rule.row == TILE else f"nm{rule.row}"
    mark = launch.launcher("sparse", f"sparse_{name}_{dtype.itemsize}", device)
    measure = launch.launcher("sparse", "sparse_length", device)

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        header, masks, starts, payload = _sections(aligned(out), numel)
        head = SparseSections.of(numel).inner
        values = payload if lossy is None else _scratch(rule, numel, dtype, device)
        last = rule.kept(numel % TILE)
        length = head + inner._nbytes(rule.kept(numel), dtype.itemsize)
        mark(tile_blocks(numel), src, header, masks, starts, values, numel, rule.of(rule.row), last, length)
        if lossy is not None:
            lossy.encode(values, payload, len(values), key)
            if not inner.exact:
                measure(1, header, payload, None, head, PERIOD, 0)

    return encode


def _sections(payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of the header, the masks, the starts and the inner payload."""
    masks, starts, inner = SparseSections.of(numel)
    return payload[:masks], payload[masks:starts], payload[starts:inner], payload[inner:]


def _count(header: torch.Tensor) -> torch.Tensor:
    return header[8:].view(torch.int64)


def _scratch(rule: Rule, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate room for all elements that the rule may keep."""
    return torch.empty(numel if rule is None else rule.kept(numel), dtype=dtype, device=device)
