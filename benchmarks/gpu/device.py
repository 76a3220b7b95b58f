"""Bandwidth of a GPU, and the part of it that the codecs reach: ``python -m benchmarks.gpu.device``.

Times are taken with CUDA events around each call, after a warm-up; the figures are medians. Each call uses other
buffers than the one before, far larger together than the cache. GB/s is 10^9 bytes a second, bytes read plus written.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actstore.base.spec import Spec
from actstore.bench import data
from actstore.bench.codecs.contenders import KEY, Contender, OurTrip, Trip, select
from actstore.bench.trainer import relative_error
from actstore.codecs import Codec
from actstore.codecs.dispatch import KernelCodec
from actstore.errors import KernelUnavailable, SpecError
from benchmarks.gpu import place as gpu_place
from benchmarks.gpu.place import MIB, ROTATION, Place, Sheet, rate

NBYTES = 512 * MIB  # of one source buffer
REPEATS = 40
DTYPES = (torch.float32, torch.bfloat16)
COLUMNS = 4096
CHECKED_ROWS = 256  # a multiple of the number of tokens that share a scale
DRY_CODECS = ("int8", "expack")  # codecs of a dry run


def ceilings(place: Place) -> dict[str, Any]:
    """Measure the device copy, and pinned copies over the link, each way alone and both at once."""
    nbytes, repeats = place.sized((NBYTES, REPEATS), (4 * MIB, 5))
    device = [torch.rand(nbytes // 4, device=place.device) for _ in range(2 * ROTATION)]
    found: dict[str, Any] = {"nbytes": nbytes}

    def measure(name: str, run: Callable[[int], Any], moved: int) -> None:
        found[name] = rate(place.times_ms(run, repeats), moved)

    measure("device_copy", lambda i: device[i].copy_(device[ROTATION + i]), 2 * nbytes)
    host = [torch.rand(nbytes // 4) for _ in range(2)]
    if place.on_gpu:
        host = [memory.pin_memory() for memory in host]
    measure("host_to_device", lambda i: device[i].copy_(host[0], non_blocking=True), nbytes)
    measure("device_to_host", lambda i: host[1].copy_(device[i], non_blocking=True), nbytes)

    def on_two_streams(index: int) -> None:
        here = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(here)
        with torch.cuda.stream(streams[0]):
            device[index].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(device[ROTATION + index], non_blocking=True)
        for stream in streams:
            here.wait_stream(stream)

    def one_by_one(index: int) -> None:
        device[index].copy_(host[0])
        host[1].copy_(device[ROTATION + index])

    streams = [torch.cuda.Stream() for _ in range(2)] if place.on_gpu else []
    measure("both_ways", on_two_streams if place.on_gpu else one_by_one, 2 * nbytes)
    return found


def matches(codec: Codec, source: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether the first rows that came back are bit-identical to the result of PyTorch operations on these rows.

    Groups and tiles do not cross the end of these rows, but for the last one of `zmask`, which packs what is not zero.
    """
    if not isinstance(codec, KernelCodec):
        return True
    rows = source[:CHECKED_ROWS]
    fitted, width = codec._fitted(rows.shape, rows.stride())
    kernels, numel = fitted.kernels("torch", rows.dtype, rows.device), rows.numel()
    payload = torch.empty(codec.size(Spec.of(rows)).nbytes, dtype=torch.uint8, device=rows.device)
    expected = torch.empty_like(rows)
    if width and kernels.rows is not None:
        encode, decode = kernels.rows(numel, width)
        encode(rows, payload, KEY)
        decode(payload, expected, KEY)
    else:
        kernels.encode(rows, payload, numel, KEY)
        kernels.decode(payload, expected, numel, KEY)
    whole = CHECKED_ROWS - (codec.name == "zmask")
    return torch.equal(found[:whole].view(torch.uint8), expected[:whole].view(torch.uint8))


def poison(trip: Trip) -> None:
    """Fill the buffers of a trip of actstore with NaN, so that bytes that a kernel omits are visible."""
    if isinstance(trip, OurTrip):
        trip.payload.fill_(0xA5)
        trip.out.view(torch.uint8).fill_(0xFF)


def kernels(place: Place, path: Path) -> dict[str, Any]:
    """Measure encode and decode of each codec and dtype, in GB/s and as a fraction of the device copy beside them."""
    nbytes, names = place.sized((NBYTES, []), (4 * MIB, list(DRY_CODECS)))
    copies = [torch.rand(nbytes // 4, device=place.device) for _ in range(2 * ROTATION)]
    copy = rate(place.times_ms(lambda i: copies[i].copy_(copies[ROTATION + i]), REPEATS), 2 * nbytes)
    copies.clear()
    rows = {
        f"{contender.name} {str(dtype).removeprefix('torch.')}": (contender, dtype, data_name)
        for contender in select(names)[0]
        for dtype, data_name in contender.inputs(list(DTYPES))
    }
    sheet = Sheet(path, rows)
    sheet.found |= {"nbytes": nbytes, "device_copy": copy}
    for name in sheet.left():
        contender, dtype, data_name = rows[name]
        row: dict[str, Any] = {"name": name, "data": data_name}
        try:
            row |= kernel_row(contender, dtype, data_name, copy["gbps"], place, nbytes)
        except (SpecError, KernelUnavailable) as error:  # a codec for the CPU only, or a missing package
            row["left_out"] = str(error).splitlines()[0]
        except Exception as error:  # the remaining rows run; the part fails
            row |= {"correct": False, "failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        sheet.put(row)
        place.empty_cache()
    return sheet.found


def kernel_row(
    contender: Contender, dtype: torch.dtype, name: str, copy_gbps: float, place: Place, nbytes: int
) -> dict[str, Any]:
    """Measure one codec on one dtype: the error of a trip, the ratio, and the rates both ways."""
    shape = (nbytes // dtype.itemsize // COLUMNS, COLUMNS)
    sources = [data.make(name, shape, dtype, seed, place.device) for seed in range(ROTATION)]
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
    if good:
        for verb, run in (("encode", lambda i: trips[i].encode()), ("decode", lambda i: trips[i].decode())):
            row[verb] = rate(place.times_ms(run, place.sized(REPEATS, 3)), nbytes + size)
            row[verb]["of_copy"] = row[verb]["gbps"] / copy_gbps
    return row


def main() -> int:
    options = gpu_place.parser_of(__doc__).parse_args()
    place = gpu_place.place_of(options)
    found = kernels(place, options.json)
    wrong = [row["name"] for row in found["rows"] if not row.get("correct", True)]
    print(f"{len(found['rows'])} rows{', wrong: ' if wrong else ''}{', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
