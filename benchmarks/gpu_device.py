"""What a GPU can move and what the codecs reach of it: ``python benchmarks/gpu_device.py ceilings|kernels``.

Times are taken with CUDA events around each call, after a warm-up; the figures are medians. Each call works on other
buffers than the one before, far larger together than the cache. GB/s is 10^9 bytes a second, bytes read plus written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from actstore.codecs import Codec, Int8, Raw
from actstore.spec import Spec

MIB = 2**20
NBYTES = 512 * MIB  # of one source buffer
ROTATION = 4  # buffers of each kind
REPEATS = 40
CODECS: tuple[Codec, ...] = (Raw(), Int8())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT8_ERROR = 0.02  # more than this on Gaussian data is a broken kernel, not a rounding

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


def check(codec: Codec, source: torch.Tensor, payload: torch.Tensor, out: torch.Tensor) -> float:
    """Relative error of one trip through `codec` over poisoned buffers; NaN where something is not written."""
    payload.fill_(0xA5)
    out.fill_(float("nan"))
    codec.encode(source, payload)
    codec.decode(payload, out)
    off = (out.double() - source.double()).norm() / source.double().norm()
    return float(off)


def kernels(save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Encode and decode of each codec and dtype, in GB/s and as a fraction of the device copy measured beside them."""
    copies = [torch.rand(NBYTES // 4, device="cuda") for _ in range(2 * ROTATION)]
    copy = rate(time_events(lambda i: copies[i].copy_(copies[ROTATION + i])), 2 * NBYTES)
    copies.clear()
    found: dict[str, Any] = {"nbytes": NBYTES, "device_copy": copy, "rows": []}
    for codec in CODECS:
        for dtype in DTYPES:
            found["rows"].append(kernel_row(codec, dtype, copy["gbps"]))
            save(found)
    return found


def kernel_row(codec: Codec, dtype: torch.dtype, copy_gbps: float) -> dict[str, Any]:
    """One codec on one dtype: the error of a trip, and the rates both ways."""
    sources = [torch.randn(NBYTES // dtype.itemsize, device="cuda", dtype=dtype) for _ in range(ROTATION)]
    outs = [torch.empty_like(source) for source in sources]
    size = codec.size(Spec.of(sources[0])).nbytes
    payloads = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in sources]
    error = check(codec, sources[0], payloads[0], outs[0])
    good = error == 0 if codec.lossless else error < INT8_ERROR
    row: dict[str, Any] = {
        "codec": codec.name,
        "dtype": str(dtype).removeprefix("torch."),
        "error": error,
        "correct": good,
    }
    if good:
        for index in range(ROTATION):
            codec.encode(sources[index], payloads[index])
        moved = NBYTES + size
        for verb, times in (
            ("encode", time_events(lambda i: codec.encode(sources[i], payloads[i]))),
            ("decode", time_events(lambda i: codec.decode(payloads[i], outs[i]))),
        ):
            row[verb] = rate(times, moved)
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
    return 0 if all(row["correct"] for row in found.get("rows", [])) else 1


if __name__ == "__main__":
    sys.exit(main())
