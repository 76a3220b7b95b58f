"""Device and scale of a part of the GPU suite: in full on a GPU, or small on a CPU as a check that everything runs."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, TypeVar

import torch

T = TypeVar("T")
MIB = 2**20
COMMIT = "ACTSTORE_COMMIT"  # environment variable of a part: the commit that is measured
ROTATION = 4  # buffers of each kind, used in turn, so that none is in the cache


@dataclass(frozen=True)
class Place:
    """A device and a scale.

    Attributes
    ----------
    device : cuda or cpu
    small : whether sizes are small enough for a CPU
    """

    device: str = "cuda"
    small: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def sized(self, full: T, small: T) -> T:
        """Return the size for this scale."""
        return small if self.small else full

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Return unused memory of the allocator to the device."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        """Return the bytes that the GPU's allocator has given out; 0 on a CPU."""
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    def reset_peak(self) -> None:
        """Reset the high-water mark of `allocated`."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the high-water mark of `allocated`."""
        return torch.cuda.max_memory_allocated() if self.on_gpu else 0

    def reserved(self) -> int:
        """Return the high-water mark of what the GPU's allocator has taken from the device; 0 on a CPU."""
        return torch.cuda.max_memory_reserved() if self.on_gpu else 0

    def energy_j(self) -> float | None:
        """Return the joules that the GPU has used so far; None where NVML does not tell, and on a CPU."""
        used = ctypes.c_ulonglong()
        try:
            device = _nvml_device() if self.on_gpu else None
        except OSError:
            return None
        if device is None or _nvml().nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(used)):
            return None
        return used.value / 1e3

    def elapsed_ms(self, run: Callable[[], Any]) -> float:
        """Return milliseconds of one call that begins and ends with an idle device."""
        return self.times_ms(lambda _: run(), 1, rotation=0)[0]

    def times_ms(self, run: Callable[[int], Any], repeats: int, rotation: int = ROTATION) -> list[float]:
        """Return milliseconds of `repeats` calls of ``run(i)``, i below `rotation` in turn, after one turn unmeasured.

        On a GPU no call waits for the one before, and the times are those of the current stream.
        """
        for index in range(rotation):
            run(index)
        if not self.on_gpu:
            marks = [perf_counter()]
            for index in range(repeats):
                run(index % max(1, rotation))
                marks.append(perf_counter())
            return [(b - a) * 1e3 for a, b in pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for index in range(repeats):
            run(index % max(1, rotation))
            events[index + 1].record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)]


@cache
def _nvml() -> Any:
    return ctypes.CDLL("libnvidia-ml.so.1")


@cache
def _nvml_device() -> ctypes.c_void_p | None:
    """Return the current GPU as NVML knows it; None where it does not."""
    found, uuid = ctypes.c_void_p(), f"GPU-{torch.cuda.get_device_properties().uuid}"
    failed = _nvml().nvmlInit_v2() or _nvml().nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(found))
    return None if failed else found


def rate(times_ms: list[float], nbytes: int) -> dict[str, float]:
    """Return median and quartiles in milliseconds, and the rate of `nbytes` at the median in 10^9 bytes a second."""
    low, _, high = quantiles(times_ms, n=4)
    middle = median(times_ms)
    return {"ms": middle, "low_ms": low, "high_ms": high, "gbps": nbytes / middle / 1e6}


def medians(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure."""
    return {name: median(sample[name] for sample in samples) for name in samples[0]}


def wrong(rows: list[dict[str, Any]], reference: str) -> list[str]:
    """Return the failures, and the exact rows whose gradients differ from those of the reference."""
    said = [f"{row['name']} failed: {row['failed']}" for row in rows if "failed" in row]
    return said + [
        f"{row['name']}: other gradients than {reference}"
        for row in rows
        if row.get("exact") and "equal" in row and not row["equal"]
    ]


def reported(said: list[str]) -> int:
    """Print what is wrong, and return the exit code."""
    for line in said:
        print(line, file=sys.stderr)
    return 1 if said else 0


class Sheet:
    """Figures of a part in its file, with the rows of earlier runs. Rows of this commit are not measured again.

    Attributes
    ----------
    found : the figures; ``rows`` have a name and the commit that measured them
    """

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self._path, self._commit = path, os.environ.get(COMMIT, "")
        self._names = list(names)
        self.found: dict[str, Any] = (read(path) or {}) | {}
        self.found["rows"] = [row for row in self.found.get("rows", ()) if row["name"] in self._names]

    def left(self) -> list[str]:
        """Return the names of the rows to measure, in order: those without figures of this commit."""
        done = {row["name"] for row in self.found["rows"] if is_of(row, self._commit) and not row.get("failed")}
        return [name for name in self._names if name not in done]

    def put(self, row: dict[str, Any]) -> None:
        """Add a row or replace the one of its name, and write the file."""
        rows = {old["name"]: old for old in self.found["rows"]} | {row["name"]: row | {"commit": self._commit}}
        self.found["rows"] = [rows[name] for name in self._names if name in rows]
        self.save()

    def save(self) -> None:
        """Write the file."""
        self._path.write_text(json.dumps(self.found, indent=1) + "\n")


def is_of(figures: dict[str, Any], commit: str) -> bool:
    """Return whether a commit measured the figures; an unknown commit measured none."""
    return bool(commit) and figures.get("commit") == commit


def read(path: Path) -> Any:
    """Return the JSON of a file; None without a file, or for a part of one."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a part's program, with the options that all have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--json", type=Path, required=True, help="write the figures to this file, row by row")
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, no figure of a GPU")
    parser.add_argument("--scale", choices=("full", "small"), default="full", help="small: sizes that a CPU bears")


def place_of(options: argparse.Namespace) -> Place:
    """Return the requested place; without its device the program ends with exit code 2."""
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        sys.exit(2)
    return Place(options.device, options.scale == "small")
