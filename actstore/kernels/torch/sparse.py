"""zmask, topk and nm as PyTorch operations, for devices without a kernel. The bytes: csrc/sparse.md."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from actstore.errors import PayloadError
from actstore.kernels.base import Inner, Kernels, payload_pointer, storage_slice
from actstore.kernels.sparse import HEADER_NBYTES, TILE, Largest, Rule, SparseSections, check_header
from actstore.kernels.torch.groups import chunks

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def kernels(dtype: torch.dtype, device: torch.device, rule: Rule, inner: Inner) -> Kernels:
    """Return the kernels for one dtype and rule, around those of the inner codec.

    They allocate temporaries, and wait for the device, which counts the kept elements.
    """
    parts = inner.kernels("torch", dtype, device)
    integer = INTEGERS[dtype.itemsize]

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> int:
        payload_pointer(out)
        sections = SparseSections.of(numel)
        out[HEADER_NBYTES : sections.inner].zero_()
        masks, starts = out[sections.masks : sections.starts], out[sections.starts : sections.inner].view(torch.int64)
        values, counts = [], []
        for start, count in chunks(numel):
            elements = storage_slice(src, start, count)
            bits = elements.view(integer)
            kept = bits != 0 if rule is None else _largest(bits, rule)
            values.append(elements[kept])
            octets = pad(kept, (0, -count % 8)).view(-1, 8).to(torch.uint8) << torch.arange(8, device=src.device)
            masks[start // 8 :][: len(octets)] = octets.sum(1, dtype=torch.uint8)
            counts.append(pad(kept, (0, -count % TILE)).view(-1, TILE).sum(1))
        ends = torch.cat(counts).cumsum(0)
        starts[1 : len(ends)] = ends[:-1]
        found = torch.cat(values)
        used = 0
        if len(found):
            used = parts.encode(found, out[sections.inner :], len(found), key)
            if used is None:
                used = inner._nbytes(len(found), dtype.itemsize)
        header = [sections.inner + used, len(found)]
        out[:HEADER_NBYTES] = torch.tensor(header, dtype=torch.int64, device=out.device).view(torch.uint8)
        return header[0]

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload_pointer(buf)
        sections = SparseSections.of(numel)
        if len(buf) < sections.inner:
            raise PayloadError(
                f"a sparse payload ends after {len(buf)} bytes: must have {sections.inner} before its elements."
            )
        length, total = buf[:HEADER_NBYTES].view(torch.int64).tolist()
        check_header(len(buf), (length, total), numel, dtype.itemsize, rule, inner)
        octets = buf[sections.masks :][: -(-numel // 8)]

        def kept(start: int, count: int) -> torch.Tensor:
            bits = octets[start // 8 :][: -(-count // 8)].view(-1, 1) >> torch.arange(8, device=buf.device)
            return bits.view(-1)[:count] & 1 != 0

        numbers = [int(kept(start, count).sum()) for start, count in chunks(numel)]
        if sum(numbers) != total:
            raise PayloadError("a sparse payload was altered: its masks and its count contradict each other.")
        values = torch.empty(total, dtype=dtype, device=out.device)
        if total:
            parts.decode(buf[sections.inner : length], values, total, key)
        for (start, count), found in zip(chunks(numel), values.split(numbers), strict=True):
            target = storage_slice(out, start, count).view(integer).zero_()
            target[kept(start, count)] = found.view(integer)

    return Kernels(encode, decode)


def _largest(bits: torch.Tensor, rule: Largest) -> torch.Tensor:
    """Mark the largest magnitudes, given as the bits of floats, of every row; of equal ones the first."""
    magnitudes = bits & torch.iinfo(bits.dtype).max
    full = len(bits) // rule.row * rule.row
    rows = [magnitudes[:full].view(-1, rule.row)] if full else []
    rows += [magnitudes[full:].view(1, -1)] if full < len(bits) else []
    marks = []
    for row in rows:
        order = row.sort(dim=1, descending=True, stable=True).indices[:, : rule.of(row.shape[1])]
        marks.append(torch.zeros_like(row, dtype=torch.bool).scatter_(1, order, True).view(-1))
    return torch.cat(marks)
