"""Cost of a step whose activations go to disk and come back: ``python benchmarks/overlap.py --folder FOLDER``.

Layers of Linear and Tanh on the CPU; the widths set the ratio of compute to bytes. "compute / transfer" is the time of
a plain step divided by the total time of its copies, out and back. "raw" stays in memory: it shows the cost of encoding
and decoding. "disk alone" is a plain step without a store, while threads write as many bytes as all outputs of layers
have to the same disk and read them again: no step that uses the disk can be faster. A store moves the input, too. The
three take turns, each timed step with a plain one right before or after it; ratios are medians over these pairs.
Gradients are compared bit for bit, except in the first two steps of a process, which can differ from later ones even
without a store.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from actstore import ActivationStore, Disk, Trace
from actstore.bench.environment import environment
from actstore.devices.cpu import map_pages
from actstore.tiers.disk import WORKERS
from actstore.tiers.file import NamelessFile
from actstore.tiers.parts import Ring
from actstore.trace import picture as timeline

SHAPES = ((256, 8192, 12), (512, 4096, 12), (1024, 4096, 8), (2048, 2048, 6), (4096, 2048, 4))  # width, tokens, layers


class DiskAlone:
    """Threads that write a buffer for each layer that forward passes, and read it when backward comes there."""

    def __init__(self, model: nn.Sequential, folder: Path, nbytes: int) -> None:
        self._file = NamelessFile(folder)
        self._buffer = memoryview(map_pages(nbytes))
        self._buffer[:] = bytes(nbytes)
        self._file.reserve(nbytes * len(model))
        self._workers = ThreadPoolExecutor(WORKERS), ThreadPoolExecutor(WORKERS)
        self._jobs: list[Future[None]] = []
        self._on = False
        for i, layer in enumerate(model):
            layer.register_forward_hook(partial(self._passed, i))

    def __enter__(self) -> None:
        self._on = True

    def __exit__(self, *_: object) -> None:
        self._on = False

    def wait(self) -> None:
        for job in self._jobs:
            job.result()
        self._jobs.clear()

    def _passed(self, i: int, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        if self._on:
            self._move(self._workers[0], self._write, i)
            output.register_hook(lambda _: self._move(self._workers[1], self._read, i))

    def _move(self, workers: ThreadPoolExecutor, move: Callable[[int, int, int], None], i: int) -> None:
        nbytes = len(self._buffer)
        for start in range(0, nbytes, Ring.chunk_nbytes):
            self._jobs.append(workers.submit(move, i * nbytes, start, min(start + Ring.chunk_nbytes, nbytes)))

    def _write(self, place: int, start: int, end: int) -> None:
        self._file.write([self._buffer[start:end]], place + start)

    def _read(self, place: int, start: int, end: int) -> None:
        self._file.read([self._buffer[start:end]], place + start, end - start)


class Training:
    """One model, and its steps with and without a store."""

    def __init__(self, width: int, tokens: int, layers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
        self._x = torch.randn(tokens, width)

    def step(
        self, context: AbstractContextManager[Any], end: Callable[[], None] | None = None
    ) -> tuple[float, list[Tensor | None]]:
        """Return milliseconds and gradients; the step ends with `end`."""
        self.model.zero_grad()
        begin = perf_counter()
        with context:
            loss = self.model(self._x).square().mean()
        loss.backward()
        if end is not None:
            end()
        return 1e3 * (perf_counter() - begin), [parameter.grad for parameter in self.model.parameters()]

    def pair(
        self, context: AbstractContextManager[Any], end: Callable[[], None] | None, *, plain_first: bool, check: bool
    ) -> tuple[float, float]:
        """Return (ms in the context, ms of plain) of two steps, one after the other."""
        if plain_first:
            plain, ours = self.step(nullcontext()), self.step(context, end)
        else:
            ours, plain = self.step(context, end), self.step(nullcontext())
        for a, b in zip(ours[1], plain[1], strict=True):
            if check and (a is None or b is None or not torch.equal(a, b)):
                raise SystemExit("the gradients differ from those of plain training")
        return ours[0], plain[0]


def measure(shape: tuple[int, int, int], folder: Path, repeats: int) -> dict[str, Any]:
    """Return the figures of one shape."""
    training = Training(*shape)
    stores = {name: ActivationStore(training.model, name, tiers=[Disk(folder)]) for name in ("raw", "raw @ disk")}
    alone = DiskAlone(training.model, folder, 4 * shape[0] * shape[1])
    ways: dict[str, tuple[Any, Any]] = {"disk alone": (alone, alone.wait)}
    ways |= {name: (store, None) for name, store in stores.items()}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repeat in range(-2, repeats):
        for name, (context, end) in ways.items():
            pair = training.pair(context, end, plain_first=bool(repeat % 2), check=repeat >= 0)
            if repeat >= 0:
                pairs[name].append(pair)
    row: dict[str, Any] = {"width": shape[0], "tokens": shape[1], "layers": shape[2]}
    for name, found in pairs.items():
        row[name] = {"ratio": median(ours / plain for ours, plain in found), "pairs_ms": found}
    for name, store in stores.items():
        report = store.report()
        row[name]["stall_ms"] = report.stall_ms
        row[name]["copies_ms"] = report.offload_ms + report.fetch_ms
        row[name]["held_bytes"] = report.held_bytes
        row["saved_bytes"] = report.saved_bytes
        store.close()
    row["plain_ms"] = median(plain for found in pairs.values() for _, plain in found)
    ours, floor = (row[name]["pairs_ms"] for name in ("raw @ disk", "disk alone"))
    row["of disk alone"] = median(a / b / (c / d) for (a, b), (c, d) in zip(ours, floor, strict=True))
    return row


def picture(folder: Path, path: Path) -> None:
    """Draw the timeline of a step, of the shape that docs/guide/moving.md shows."""
    training = Training(*SHAPES[2])
    store = ActivationStore(training.model, "raw @ disk", tiers=[Disk(folder)], observe=[Trace()])
    for _ in range(4):
        training.step(store)
    timeline.save(store.trace, path)
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (here)")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="draw the timeline of one step here")
    args = parser.parse_args()
    table = Table(
        "width", "plain ms", "saved", "compute / transfer", "raw", "disk alone", "raw @ disk", "of disk alone", "held",
        "stall ms",
    )  # fmt: skip
    rows = []
    for shape in SHAPES:
        row = measure(shape, args.folder, args.repeats)
        rows.append(row)
        disk, saved = row["raw @ disk"], row["saved_bytes"]
        cells = (
            f"{row['plain_ms']:.0f}",
            f"{saved / 2**20:.0f} MiB",
            f"{row['plain_ms'] / disk['copies_ms']:.1f}",
            f"{row['raw']['ratio']:.2f}",
            f"{row['disk alone']['ratio']:.2f}",
            f"{disk['ratio']:.2f}",
            f"{row['of disk alone']:.2f}",
            f"{disk['held_bytes'] / saved:.0%}",
            f"{disk['stall_ms']:.1f}",
        )
        table.add_row(str(shape[0]), *cells)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))
    if args.plot:
        picture(args.folder, args.plot)


if __name__ == "__main__":
    main()
