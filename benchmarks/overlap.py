"""What a step costs while its activations go to disk and come back: ``python benchmarks/overlap.py --folder FOLDER``.

Layers of Linear and Tanh on the CPU; widths differ, and with them how much compute there is for each byte. "compute /
transfer" is the time of a plain step divided by the time for which copies ran, those out and those back added up. "raw"
stays in memory: it shows what encoding and decoding cost, and the difference to "raw @ disk" is what the disk costs.
Each timed step has a plain step right before or after it; ratios are medians over these pairs. Gradients are compared
bit for bit, but for the first two steps: those of a process can differ from later ones without a store, too.
"""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from actstore import ActivationStore
from actstore.bench import timeline
from actstore.bench.environment import environment

SHAPES = ((256, 8192, 12), (512, 4096, 12), (1024, 4096, 8), (2048, 2048, 6), (4096, 2048, 4))  # width, tokens, layers


class Training:
    """One model, and its steps with and without a store."""

    def __init__(self, width: int, tokens: int, layers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
        self._x = torch.randn(tokens, width)

    def step(self, context: AbstractContextManager[Any]) -> tuple[float, list[Tensor | None]]:
        """Milliseconds and gradients."""
        self.model.zero_grad()
        begin = perf_counter()
        with context:
            loss = self.model(self._x).square().mean()
        loss.backward()
        return 1e3 * (perf_counter() - begin), [parameter.grad for parameter in self.model.parameters()]

    def pairs(self, store: ActivationStore, repeats: int) -> list[tuple[float, float]]:
        """(ms with the store, ms of plain) of steps side by side, after two steps of each."""
        found = []
        for repeat in range(-2, repeats):
            if repeat % 2:
                plain, ours = self.step(nullcontext()), self.step(store)
            else:
                ours, plain = self.step(store), self.step(nullcontext())
            if repeat < 0:
                continue
            for a, b in zip(ours[1], plain[1], strict=True):
                if a is None or b is None or not torch.equal(a, b):
                    raise SystemExit("the gradients differ from those of plain training")
            found.append((ours[0], plain[0]))
        return found


def measure(shape: tuple[int, int, int], folder: Path, repeats: int) -> dict[str, Any]:
    """The figures of one shape."""
    training = Training(*shape)
    row: dict[str, Any] = {"width": shape[0], "tokens": shape[1], "layers": shape[2]}
    for policy in ("raw", "raw @ disk"):
        store = ActivationStore(training.model, policy, disk_path=folder)
        pairs = training.pairs(store, repeats)
        report = store.report()
        store.close()
        row[policy] = {
            "ratio": median(ours / plain for ours, plain in pairs),
            "pairs_ms": pairs,
            "stall_ms": report.stall_ms,
            "copies_ms": report.offload_ms + report.fetch_ms,
            "held_bytes": report.held_bytes,
        }
    row["saved_bytes"] = report.saved_bytes
    row["plain_ms"] = median(plain for policy in ("raw", "raw @ disk") for _, plain in row[policy]["pairs_ms"])
    return row


def picture(folder: Path, path: Path) -> None:
    """The timeline of a step, of the shape that the README talks of."""
    training = Training(*SHAPES[2])
    store = ActivationStore(training.model, "raw @ disk", disk_path=folder, trace=True)
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
    table = Table("width", "plain ms", "saved", "compute / transfer", "raw", "raw @ disk", "held", "stall ms")
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
            f"{disk['ratio']:.2f}",
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
