"""Rates of the transfer engine on a GPU: ``python -m benchmarks.gpu.transfer --json FILE``.

link      payloads through the engine, each way alone and both at once, beside what plain pinned copies reach
hidden    a step whose compute takes 1.5 times as long as its transfer: compute should hardly wait
exposed   one whose compute takes half as long: compute should wait as long as theory says
steady    what 20 equal steps allocate after the first three
payloads  host time of small payloads, beside the offloads of PyTorch and of TRL
price     raw copied into a buffer of the store and from there to the host, against a copy from the tensor itself
pinning   registering pages, against torch's pinned allocator

The device copy and the pinned copies that it is compared with come first. GB/s is 10^9 bytes a second; on the link each
byte counts once. The file is written after each measurement; it names one that fails, and the remaining ones run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from actstore.codecs import Raw
from actstore.devices import Device, open_device
from actstore.tiers import Tier
from actstore.tiers.disk import DiskTier
from actstore.tiers.host import HostTier
from actstore.trace import Trace
from actstore.transfer.engine import DEVICE_WINDOW_NBYTES
from benchmarks.gpu import chain as gpu_chain
from benchmarks.gpu import payloads
from benchmarks.gpu import place as gpu_place
from benchmarks.gpu.chain import REPEATS, Chain
from benchmarks.gpu.device import ceilings
from benchmarks.gpu.place import COMMIT, MIB, ROTATION, Place, rate, read
from benchmarks.gpu.shuttle import Found, shuttle_row

SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MIN_SAMPLE_NBYTES, MIN_SAMPLE_COUNT = 1024 * MIB, 16  # bytes and payloads that cross the link in one sample, at least
PRICE_SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
PINNED_SIZES = (64 * MIB, 1024 * MIB, 4096 * MIB)
SMALL_SIZES = (MIB // 4, MIB)
GOALS = {"of_ceiling": 0.9, "stall_share": 0.02, "stall_over_theory": 1.05, "allocated": 0}

Save = Callable[[], None]
Measurement = Callable[[Place, Found, Save], Any]


def policy(place: Place) -> str:
    """Return the policy that moves payloads away; on a CPU host memory is the device, so payloads go to disk."""
    return "raw @ host" if place.on_gpu else "raw @ disk"


@contextmanager
def opened(place: Place) -> Iterator[tuple[Device, Tier]]:
    """Yield a device, and a tier away from it."""
    device = open_device(torch.device("cuda", torch.cuda.current_device()) if place.on_gpu else torch.device("cpu"))
    with TemporaryDirectory() as folder:
        tier = HostTier(device) if place.on_gpu else DiskTier(Path(folder), device)
        try:
            yield device, tier
        finally:
            tier.close()


def link(place: Place, found: Found, save: Save) -> list[Found]:
    """Return a row for each size of payload, with its part of the ceiling; the largest with a larger window too."""
    names = {"out": "device_to_host", "back": "host_to_device", "both": "both_ways"}
    sizes, least = place.sized((SIZES, MIN_SAMPLE_NBYTES), (SMALL_SIZES, MIB))
    rows: list[Found] = []
    found["link"] = rows
    for nbytes, window_nbytes in [*((size, None) for size in sizes), (sizes[-1], 4 * sizes[-1])]:
        with opened(place) as (device, tier):
            row = shuttle_row(device, tier, nbytes, max(MIN_SAMPLE_COUNT, least // nbytes), window_nbytes)
        for name, ceiling in names.items():
            row[name]["of_ceiling"] = row[name]["gbps"] / found["ceilings"][ceiling]["gbps"]
        rows.append(row)
        save()
        place.empty_cache()
    return rows


def job(place: Place, found: Found, factor: float) -> Chain:
    """Return the chain whose compute takes `factor` times as long as its transfer."""
    chain = Chain(place.device, layers=4, tokens=512, width=128) if place.small else Chain(place.device)
    chain.balance(factor, chain.nbytes / found["ceilings"]["device_to_host"]["gbps"] / 1e6)
    return chain


def hidden(place: Place, found: Found, save: Save) -> Found:
    return gpu_chain.measure(job(place, found, 1.5), policy(place), place.sized(REPEATS, 2))


def exposed(place: Place, found: Found, save: Save) -> Found:
    """Measure the exposed step, with the stall that theory gives for the payloads that a traced step fetched."""
    chain = job(place, found, 0.5)
    figures = gpu_chain.measure(chain, policy(place), place.sized(REPEATS, 2))
    events = gpu_chain.traced(chain, policy(place)).events()
    out_ms, back_ms = (
        chain.nbytes / found["ceilings"][name]["gbps"] / 1e6 for name in ("device_to_host", "host_to_device")
    )
    fetched = sum(event.nbytes for event in events if event.kind == "fetch") // chain.nbytes
    return figures | with_theory(figures, DEVICE_WINDOW_NBYTES // chain.nbytes, fetched, out_ms, back_ms)


def with_theory(figures: Found, ahead: int, fetched: int, out_ms: float, back_ms: float) -> Found:
    """Add the theoretical stall, and the measured one as a multiple of it."""
    compute_ms = figures["plain_ms"] / 2 / figures["layers"]
    theory_ms = gpu_chain.theoretical_stall_ms(figures["layers"], ahead, fetched, compute_ms, out_ms, back_ms)
    over = figures["stall_ms"] / theory_ms if theory_ms else None
    return {"fetched": fetched, "theory_ms": theory_ms, "stall_over_theory": over}


def steady(place: Place, found: Found, save: Save) -> Found:
    return gpu_chain.steady(job(place, found, 1.5), policy(place))


def price(place: Place, found: Found, save: Save) -> list[Found]:
    """Measure the cost of the rule that copy streams never touch a user's tensor."""
    rows = []
    for nbytes in place.sized(PRICE_SIZES, SMALL_SIZES):
        sources = [torch.rand(nbytes // 4, device=place.device) for _ in range(ROTATION)]
        buffers = [torch.empty(nbytes, dtype=torch.uint8, device=place.device) for _ in range(ROTATION)]
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=place.on_gpu)
        encode = Raw().bind(sources[0]).encode

        def direct(index: int) -> None:
            host.copy_(sources[index].view(torch.uint8), non_blocking=True)  # noqa: B023  # called at once

        def copy_only(index: int) -> None:
            encode(sources[index], buffers[index], 0)  # noqa: B023

        def both(index: int) -> None:
            encode(sources[index], buffers[index], 0)  # noqa: B023
            host.copy_(buffers[index], non_blocking=True)  # noqa: B023

        row: Found = {"nbytes": nbytes}
        for name, run in (("direct", direct), ("encode", copy_only), ("encode_and_copy", both)):
            row[name] = rate(place.times_ms(run, 20), nbytes)
        rows.append(row)
    return rows


def pinning(place: Place, found: Found, save: Save) -> list[Found]:
    """Return milliseconds to pin memory and to unpin it."""
    rows = []
    for nbytes in place.sized(PINNED_SIZES, SMALL_SIZES):
        row: Found = {"nbytes": nbytes}
        with opened(place) as (device, _):
            begin = perf_counter()
            memory = device.pinned(nbytes)
            row["register_ms"] = (perf_counter() - begin) * 1e3
            if memory is not None:
                begin = perf_counter()
                device.unpin(memory)
                row["unregister_ms"] = (perf_counter() - begin) * 1e3
            row["refused"] = memory is None
            del memory
        begin = perf_counter()
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=place.on_gpu)
        row["torch_ms"] = (perf_counter() - begin) * 1e3
        rows.append(row)
    return rows


def picture(trace: Trace, ndjson: Path | None, plot: Path | None) -> str | None:
    """Write a trace as NDJSON, beside it for Perfetto, and as a picture; return the error of what failed."""
    if ndjson is not None:
        trace.write(ndjson)
        trace.to_chrome(ndjson.with_suffix(".chrome.json"))
    if plot is not None:
        try:
            from actstore.trace import picture as timeline
        except ImportError as error:
            return f"no picture: {error}"
        timeline.save(trace, plot)
    return None


MEASUREMENTS: dict[str, Measurement] = {
    "ceilings": lambda place, found, save: ceilings(place),
    "link": link,
    "hidden": hidden,
    "exposed": exposed,
    "steady": steady,
    "payloads": lambda place, found, save: payloads.rows(place, policy(place)),
    "price": price,
    "pinning": pinning,
}


def run_all(measurements: dict[str, Measurement], path: Path, place: Place) -> Found:
    """Run each measurement without figures of this commit, and write after each; `failed` names those that raised."""
    commit = os.environ.get(COMMIT, "")
    found: Found = {"commits": {}} | (read(path) or {}) | {"goals": GOALS, "failed": {}, "policy": policy(place)}

    def save() -> None:
        path.write_text(json.dumps(found, indent=2) + "\n")

    for name, run in measurements.items():
        if commit and found["commits"].get(name) == commit:
            continue
        try:
            found[name] = run(place, found, save)
            found["commits"][name] = commit
        except Exception as error:  # the remaining measurements run; the part fails
            found["failed"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
        save()
        place.empty_cache()
    return found


def main() -> int:
    parser = gpu_place.parser_of(__doc__)
    parser.add_argument("--trace", type=Path, help="write the trace of one step here, and beside it for Perfetto")
    parser.add_argument("--plot", type=Path, help="draw that step into this file")
    options = parser.parse_args()

    def trace(place: Place, found: Found, save: Save) -> str | None:
        return picture(gpu_chain.traced(job(place, found, 1.5), policy(place)), options.trace, options.plot)

    found = run_all({**MEASUREMENTS, "trace": trace}, options.json, gpu_place.place_of(options))
    for name, reason in found["failed"].items():
        print(f"{name} failed: {reason}", file=sys.stderr)
    wrong = [f"link of {row['nbytes']} bytes" for row in found.get("link", []) if not row["correct"]]
    wrong += [name for name in ("hidden", "exposed") if not found.get(name, {}).get("equal", True)]
    for name in wrong:
        print(f"{name}: other bytes came back", file=sys.stderr)
    return 1 if found["failed"] or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
