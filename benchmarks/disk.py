"""Speed of the disk tier beside plain large writes and reads: ``python benchmarks/disk.py --folder FOLDER``.

plain   two threads, 8 MiB at a time, O_DIRECT where the folder takes it, in place, no checksum
small   the same from memory without a request for huge pages
checked plain, and a checksum of each 8 MiB: the bound of the tier where the disk is as fast as memory, so that the
        second read for the checksum shows
tier    `DiskTier` on the CPU: reserve, write and read of payloads of one size, checksums made and verified

All move the same bytes between page-aligned memory, the same but for "small", and a file that was written before.
"idle": the main thread waits. "computing": it multiplies matrices until the transfer is done; `compute` is the rate of
its products as a fraction of the rate without a transfer. In each repeat all run once, in a new order, in the same
bytes of a new file: the file's place on the disk can change its speed by a third. The figures are medians over the
repeats. The ratios are medians of the ratio to the plain run of the same repeat. The tier's should be 0.8 or more.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import torch
from rich.console import Console
from rich.table import Table

from actstore.bench.environment import environment
from actstore.devices import Cpu
from actstore.tiers import Slot
from actstore.tiers.disk import DiskTier
from actstore.tiers.file import NamelessFile, digest

MIB = 2**20
PLAIN_NBYTES = 8 * MIB
MATRIX_SIDE = 768
SPEED_GOAL = 0.8

Run = tuple[Callable[[], bool], Callable[[], int]]  # is it done; wait for the end, and return its time


class Way(ABC):
    """One way to move bytes from `memory` to a tier's file and back to `found`; "write" and "read" alternate.

    Its slots are free again after each read, so that all ways use the same place on the disk: another place can change
    the speed by a third.
    """

    def __init__(self, memory: torch.Tensor, found: torch.Tensor, nbytes: int) -> None:
        self._memory, self._found = memory.split(nbytes), found.split(nbytes)
        self._slots: list[Slot] = []
        self.nbytes = memory.numel()

    def start(self, tier: DiskTier, what: str) -> Run:
        if what == "write":
            self._slots = [slot for part in self._memory if (slot := tier.reserve(part.numel()))]
            if len(self._slots) < len(self._memory):
                raise SystemExit(f"the folder has no room for {self.nbytes} bytes")
            if tier.used_nbytes != self.nbytes:
                raise SystemExit(f"the file is at {tier.used_nbytes} bytes: this would be another place of the disk")
        is_done, wait = self._start(tier, what)

        def end() -> int:
            ended = wait()
            if what == "read":
                for slot in self._slots:
                    tier.free(slot)
            return ended

        return is_done, end

    @abstractmethod
    def _start(self, tier: DiskTier, what: str) -> Run: ...


class Plain(Way):
    """Plain writes and reads, as in a program without actstore."""

    def __init__(self, memory: torch.Tensor, found: torch.Tensor, checked: bool = False) -> None:
        super().__init__(memory, found, memory.numel())
        self._checked = checked

    def _start(self, tier: DiskTier, what: str) -> Run:
        (slot,), ((source,), (target,)) = self._slots, (self._memory, self._found)
        view, call = (source.numpy().data, os.pwritev) if what == "write" else (target.numpy().data, os.preadv)
        numbers, ends = count(), []

        def work() -> None:
            while (at := next(numbers) * PLAIN_NBYTES) < len(view):
                part = view[at : at + PLAIN_NBYTES]
                if call(slot.place.file._fd, [part], slot.place.start + at) != len(part):
                    raise OSError("a short write or read: the figures would be wrong")
                if self._checked:
                    digest(part)
            ends.append(perf_counter_ns())

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()

        def wait() -> int:
            for thread in threads:
                thread.join()
            return max(ends)

        return lambda: not any(thread.is_alive() for thread in threads), wait


class Payloads(Way):
    """The disk tier, with payloads of one size."""

    def _start(self, tier: DiskTier, what: str) -> Run:
        call, parts = (tier.write, self._memory) if what == "write" else (tier.read, self._found)
        tickets = [call(slot, part) for slot, part in zip(self._slots, parts, strict=True)]

        def wait() -> int:
            for ticket in tickets:
                ticket.result()
            return max(span[1] for ticket in tickets if (span := ticket.span()))

        return lambda: all(ticket.ready() for ticket in tickets), wait


class Compute:
    """Matrix products on the main thread."""

    def __init__(self) -> None:
        self._a, self._b = torch.randn(MATRIX_SIDE, MATRIX_SIDE), torch.randn(MATRIX_SIDE, MATRIX_SIDE)
        self.alone = 0.0
        for _ in range(3):
            self.alone = max(self.alone, self.rate(partial(self._past, perf_counter_ns() + 10**9)))

    def rate(self, is_done: Callable[[], bool]) -> float:
        """Return products per second until `is_done`."""
        begin, products = perf_counter_ns(), 0
        while not is_done():
            torch.mm(self._a, self._b)
            products += 1
        return products / (perf_counter_ns() - begin) * 1e9

    @staticmethod
    def _past(moment_ns: int) -> bool:
        return perf_counter_ns() > moment_ns


def measure(ways: dict[str, Way], folder: Path, repeats: int, seed: int) -> dict[tuple[str, ...], list[float]]:
    """Return figures by (setting, what, way or "compute" beside way): GB/s, and fractions of undisturbed compute."""
    compute, order = Compute(), random.Random(seed)
    figures: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for _ in range(repeats):
        tier = DiskTier(folder, Cpu(torch.device("cpu")))
        for setting in ("first", "idle", "computing"):  # the first run touches the file
            for name in order.sample(sorted(ways), len(ways)):
                for what in ("write", "read"):
                    begin = perf_counter_ns()
                    is_done, end = ways[name].start(tier, what)
                    rate = compute.rate(is_done) if setting == "computing" else 0.0
                    figures[setting, what, name].append(ways[name].nbytes / (end() - begin))
                    figures[setting, what, name, "compute"].append(rate / compute.alone)
        tier.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (here)")
    parser.add_argument("--mib", type=int, default=512, help="bytes of one run, in MiB (512)")
    parser.add_argument("--payloads", type=int, nargs="+", default=[4, 64], help="sizes of payloads, in MiB (4 64)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write all samples here")
    args = parser.parse_args()

    nbytes, cpu = args.mib * MIB, Cpu(torch.device("cpu"))
    memory, found = cpu.empty(nbytes), cpu.empty(nbytes)
    memory.random_(0, 256, generator=torch.Generator().manual_seed(0))
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    small, small_found = (torch.frombuffer(mmap.mmap(-1, nbytes, private), dtype=torch.uint8) for _ in range(2))
    small.copy_(memory)
    ways: dict[str, Way] = {
        "plain": Plain(memory, found),
        "small": Plain(small, small_found),
        "checked": Plain(memory, found, checked=True),
    }
    for size in args.payloads:
        ways[f"tier, {size} MiB"] = Payloads(memory, found, size * MIB)
    figures = measure(ways, args.folder, args.repeats, seed=0)
    if not torch.equal(memory, found) or not torch.equal(memory, small_found):
        raise SystemExit("other bytes came back")

    direct = "O_DIRECT" if NamelessFile(args.folder).direct else "buffered: O_DIRECT is refused here"
    table = Table("main thread", "what", "how", "GB/s", "ratio", "compute", title=f"{args.mib} MiB, {direct}")
    ratios = []
    for setting in ("idle", "computing"):
        for what in ("write", "read"):
            base = figures[setting, what, "plain"]
            for name in ways:
                found_here = figures[setting, what, name]
                ratio = median(a / b for a, b in zip(found_here, base, strict=True))
                if name.startswith("tier"):
                    ratios.append(ratio)
                part = median(figures[setting, what, name, "compute"])
                cells = f"{median(found_here):.2f}", f"{ratio:.2f}", f"{part:.2f}" if setting == "computing" else ""
                table.add_row(setting, what, name, *cells)
    Console().print(table, f"lowest ratio {min(ratios):.2f}, aim {SPEED_GOAL}")
    if args.json:
        samples = {", ".join(key): value for key, value in figures.items()}
        args.json.write_text(json.dumps({"environment": environment(), "samples": samples}, indent=1))


if __name__ == "__main__":
    main()
