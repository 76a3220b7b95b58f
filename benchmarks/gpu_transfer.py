"""What the transfer engine reaches on a GPU: ``python benchmarks/gpu_transfer.py --json FILE``.

link      payloads through the engine, each way alone and both at once, beside what plain pinned copies reach
hidden    a step whose compute takes 1.5 times as long as its transfer: compute should hardly wait
exposed   one whose compute takes half as long: compute should wait as long as theory says
steady    what 20 equal steps allocate after the first three
price     raw copied into a buffer of the store and from there to the host, against a copy from the tensor itself
pinning   registering pages, against torch's pinned allocator

GB/s is 10^9 bytes a second; on the link each byte counts once. The file is written after each measurement; one that
fails is named in it, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from actstore.codecs import Raw
from actstore.devices import open_device
from actstore.tiers import HostTier
from actstore.trace import Trace
from actstore.transfer.engine import DEVICE_WINDOW_NBYTES
from benchmarks import gpu_chain
from benchmarks.gpu_chain import Chain
from benchmarks.gpu_device import MIB, ROTATION, ceilings, rate, time_events
from benchmarks.gpu_shuttle import Found, shuttle_row

SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
LEAST_NBYTES, LEAST_COUNT = 1024 * MIB, 16  # that cross the link in one sample
PRICE_SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
PINNED_SIZES = (64 * MIB, 1024 * MIB, 4096 * MIB)
GOALS = {"of_ceiling": 0.9, "stall_share": 0.02, "stall_over_theory": 1.05, "allocated": 0}


def link(found: Found, save: Callable[[], None]) -> list[Found]:
    """A row for each size of payload, with its part of the ceiling; the largest with a larger window too."""
    device = open_device(torch.device("cuda", torch.cuda.current_device()))
    names = {"out": "device_to_host", "back": "host_to_device", "both": "both_ways"}
    rows: list[Found] = []
    found["link"] = rows
    for nbytes, window_nbytes in [*((size, None) for size in SIZES), (SIZES[-1], 4 * SIZES[-1])]:
        tier = HostTier(device)
        try:
            row = shuttle_row(device, tier, nbytes, max(LEAST_COUNT, LEAST_NBYTES // nbytes), window_nbytes)
        finally:
            tier.close()
        for name, ceiling in names.items():
            row[name]["of_ceiling"] = row[name]["gbps"] / found["ceilings"][ceiling]["gbps"]
        rows.append(row)
        save()
        torch.cuda.empty_cache()
    return rows


def job(found: Found, factor: float) -> Chain:
    """The chain whose compute takes `factor` times as long as its transfer."""
    chain = Chain("cuda")
    chain.balance(factor, chain.nbytes / found["ceilings"]["device_to_host"]["gbps"] / 1e6)
    return chain


def hidden(found: Found, save: Callable[[], None]) -> Found:
    return gpu_chain.measure(job(found, 1.5), "raw @ host")


def exposed(found: Found, save: Callable[[], None]) -> Found:
    """With the stall that theory gives for the payloads that a traced step fetched."""
    chain = job(found, 0.5)
    figures = gpu_chain.measure(chain, "raw @ host")
    events = gpu_chain.traced(chain, "raw @ host").events()
    out_ms, back_ms = (
        chain.nbytes / found["ceilings"][name]["gbps"] / 1e6 for name in ("device_to_host", "host_to_device")
    )
    fetched = sum(event.nbytes for event in events if event.kind == "fetch") // chain.nbytes
    return figures | with_theory(figures, DEVICE_WINDOW_NBYTES // chain.nbytes, fetched, out_ms, back_ms)


def with_theory(figures: Found, ahead: int, fetched: int, out_ms: float, back_ms: float) -> Found:
    """The stall that must be, and how the measured one compares."""
    compute_ms = figures["plain_ms"] / 2 / figures["layers"]
    theory_ms = gpu_chain.theoretical_stall_ms(figures["layers"], ahead, fetched, compute_ms, out_ms, back_ms)
    over = figures["stall_ms"] / theory_ms if theory_ms else None
    return {"fetched": fetched, "theory_ms": theory_ms, "stall_over_theory": over}


def steady(found: Found, save: Callable[[], None]) -> Found:
    return gpu_chain.steady(job(found, 1.5), "raw @ host")


def price(found: Found, save: Callable[[], None]) -> list[Found]:
    """What it costs that copy streams never touch a user's tensor."""
    rows = []
    for nbytes in PRICE_SIZES:
        sources = [torch.rand(nbytes // 4, device="cuda") for _ in range(ROTATION)]
        buffers = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(ROTATION)]
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
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
            row[name] = rate(time_events(run, repeats=20), nbytes)
        rows.append(row)
    return rows


def pinning(found: Found, save: Callable[[], None]) -> list[Found]:
    """Milliseconds to get memory pinned and to give it back."""
    device = open_device(torch.device("cuda", torch.cuda.current_device()))
    rows = []
    for nbytes in PINNED_SIZES:
        row: Found = {"nbytes": nbytes}
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
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        row["torch_ms"] = (perf_counter() - begin) * 1e3
        rows.append(row)
    return rows


def picture(trace: Trace, ndjson: Path | None, plot: Path | None) -> str | None:
    """Write a trace as NDJSON, beside it for Perfetto, and as a picture; what could not be written."""
    if ndjson is not None:
        trace.write(ndjson)
        trace.to_chrome(ndjson.with_suffix(".chrome.json"))
    if plot is not None:
        try:
            from actstore.bench import timeline
        except ImportError as error:
            return f"no picture: {error}"
        timeline.save(trace, plot)
    return None


MEASUREMENTS: dict[str, Callable[[Found, Callable[[], None]], Any]] = {
    "ceilings": lambda found, save: ceilings(),
    "link": link,
    "hidden": hidden,
    "exposed": exposed,
    "steady": steady,
    "price": price,
    "pinning": pinning,
}


def run_all(measurements: dict[str, Callable[[Found, Callable[[], None]], Any]], path: Path) -> Found:
    """Run each and write after each; `failed` names those that raised."""
    found: Found = {"goals": GOALS, "failed": {}}

    def save() -> None:
        path.write_text(json.dumps(found, indent=2) + "\n")

    for name, run in measurements.items():
        try:
            found[name] = run(found, save)
        except Exception as error:  # the others go on; the part fails
            found["failed"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
        save()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="write the figures to this file")
    parser.add_argument("--trace", type=Path, help="write the trace of one step here, and beside it for Perfetto")
    parser.add_argument("--plot", type=Path, help="draw that step into this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        return 2

    def trace(found: Found, save: Callable[[], None]) -> str | None:
        return picture(gpu_chain.traced(job(found, 1.5), "raw @ host"), options.trace, options.plot)

    found = run_all({**MEASUREMENTS, "trace": trace}, options.json)
    for name, reason in found["failed"].items():
        print(f"{name} failed: {reason}", file=sys.stderr)
    wrong = [f"link of {row['nbytes']} bytes" for row in found.get("link", []) if not row["correct"]]
    wrong += [name for name in ("hidden", "exposed") if not found.get(name, {}).get("equal", True)]
    for name in wrong:
        print(f"{name}: other bytes came back", file=sys.stderr)
    return 1 if found["failed"] or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
