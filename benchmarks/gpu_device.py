"""What a GPU can move and what the codecs reach of it: ``python benchmarks/gpu_device.py ceilings|kernels``.

Times are taken with CUDA events around each call, after a warm-up; the figures are medians. Each call works on other
buffers than the one before, far larger together than the cache. GB/s is 10^9 bytes a second, bytes read plus written.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from actstore.bench import data
from actstore.bench.codecs.contenders import KEY, Contender, OurTrip, Trip, select
from actstore.bench.trainer import relative_error
from actstore.codecs import Codec
from actstore.codecs.dispatch import KernelCodec
from actstore.errors import KernelUnavailable, SpecError
from actstore.spec import Spec

MIB = 2**20
NBYTES = 512 * MIB  # of one source buffer
ROTATION = 4  # buffers of each kind
REPEATS = 40
DTYPES = (torch.float32, torch.bfloat16)
COLUMNS = 4096
CHECKED_ROWS = 256  # a multiple of the tokens that share a scale

Run = Callable[[int], Any]


def time_events(run: Run, repeats: int = REPEATS) -> list[float]:
    """Milliseconds of each of `repeats` calls of ``run(i)`` on the current stream."""
    for index in range(ROTATION):
        run(index)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for index in range(repeats):
        run(index % ROTATION)
        marks[index + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def rate(times_ms: list[float], nbytes: int) -> dict[str, float]:
    """Median and quartiles in milliseconds, and the rate of `nbytes` at the median."""
    low, _, high = quantiles(times_ms, n=4)
    middle = median(times_ms)
    return {"ms": middle, "low_ms": low, "high_ms": high, "gbps": nbytes / middle / 1e6}


def ceilings() -> dict[str, Any]:
    """Device copy, and pinned copies over the link, each way alone and both at once."""
    device = [torch.rand(NBYTES // 4, device="cuda") for _ in range(2 * ROTATION)]
    found: dict[str, Any] = {"nbytes": NBYTES}
    times = time_events(lambda i: device[i].copy_(device[ROTATION + i]))
    found["device_copy"] = rate(times, 2 * NBYTES)
    host = [torch.rand(NBYTES // 4).pin_memory() for _ in range(2)]
    times = time_events(lambda i: device[i].copy_(host[0], non_blocking=True))
    found["host_to_device"] = rate(times, NBYTES)
    times = time_events(lambda i: host[1].copy_(device[i], non_blocking=True))
    found["device_to_host"] = rate(times, NBYTES)
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both(index: int) -> None:
        here = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(here)
        with torch.cuda.stream(streams[0]):
            device[index].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(device[ROTATION + index], non_blocking=True)
        for stream in streams:
            here.wait_stream(stream)

    found["both_ways"] = rate(time_events(both), 2 * NBYTES)
    return found


def matches(codec: Codec, source: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether the first rows of what came back are those that PyTorch operations make of these rows, bit for bit.

    Groups and tiles do not cross the end of these rows.
    """
    if not isinstance(codec, KernelCodec):
        return True
    rows = source[:CHECKED_ROWS]
    kernels, shape = codec.kernels("torch", rows.dtype, rows.device), codec._shape_args(rows.shape, rows.stride())
    payload = torch.empty(codec.size(Spec.of(rows)).nbytes, dtype=torch.uint8, device=rows.device)
    expected = torch.empty_like(rows)
    kernels.encode(rows, payload, rows.numel(), KEY, *shape)
    kernels.decode(payload, expected, rows.numel(), KEY, *shape)
    return torch.equal(found[:CHECKED_ROWS].view(torch.uint8), expected.view(torch.uint8))


def poison(trip: Trip) -> None:
    """Fill what a trip of ours writes with NaN, so that what is left out shows."""
    if isinstance(trip, OurTrip):
        trip.payload.fill_(0xA5)
        trip.out.view(torch.uint8).fill_(0xFF)


def kernels(save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Encode and decode of each codec and dtype, in GB/s and as a fraction of the device copy measured beside them."""
    copies = [torch.rand(NBYTES // 4, device="cuda") for _ in range(2 * ROTATION)]
    copy = rate(time_events(lambda i: copies[i].copy_(copies[ROTATION + i])), 2 * NBYTES)
    copies.clear()
    found: dict[str, Any] = {"nbytes": NBYTES, "device_copy": copy, "rows": []}
    for contender in select([])[0]:
        for dtype, name in contender.inputs(list(DTYPES)):
            row = {"codec": contender.name, "dtype": str(dtype).removeprefix("torch."), "data": name}
            try:
                row |= kernel_row(contender, dtype, name, copy["gbps"], "cuda", NBYTES)
            except (SpecError, KernelUnavailable) as error:  # runs on the CPU only, or a package is missing
                row["left_out"] = str(error).splitlines()[0]
            except Exception as error:  # the other rows go on; the part fails
                row |= {"correct": False, "failed": f"{type(error).__name__}: {error}".splitlines()[0]}
            found["rows"].append(row)
            save(found)
            torch.cuda.empty_cache()
    return found


def kernel_row(
    contender: Contender, dtype: torch.dtype, name: str, copy_gbps: float, device: str, nbytes: int
) -> dict[str, Any]:
    """One codec on one dtype: the error of a trip, the ratio, and on a GPU the rates both ways."""
    shape = (nbytes // dtype.itemsize // COLUMNS, COLUMNS)
    sources = [data.make(name, shape, dtype, seed, device) for seed in range(ROTATION)]
    trips = [contender.trip(source) for source in sources]
    for trip in trips:
        poison(trip)
        trip.encode()
    found = trips[0].decode()
    error = relative_error(*(tensor.split(CHECKED_ROWS) for tensor in (found, sources[0])))
    good = error == 0 if contender.lossless else math.isfinite(error)
    good &= contender.codec is None or matches(contender.codec, sources[0], found)
    size = trips[0].payload_nbytes()
    row: dict[str, Any] = {"error": error, "ratio": nbytes / size, "correct": good}
    if good and device != "cpu":
        for verb, run in (("encode", lambda i: trips[i].encode()), ("decode", lambda i: trips[i].decode())):
            row[verb] = rate(time_events(run), nbytes + size)
            row[verb]["of_copy"] = row[verb]["gbps"] / copy_gbps
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ceilings", "kernels"))
    parser.add_argument("--json", type=Path, required=True, help="write the figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        return 2

    def save(found: dict[str, Any]) -> None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")

    found = ceilings() if options.what == "ceilings" else kernels(save)
    save(found)
    return 0 if all(row.get("correct", True) for row in found.get("rows", [])) else 1


if __name__ == "__main__":
    sys.exit(main())
