"""Compiled models with a policy in their graphs: ``python -m benchmarks.planner.encoded gpt vit --dtype bfloat16``.

The whole model is compiled by Inductor. In the allocator's count, above what was there before forward: bytes that are
held at the end of forward, and the peak of backward, gradients included, both over plain compilation's. Steps take
turns with plain steps: "times plain" is the median of the ratios. Gradient errors are relative to plain compilation;
"eager" is that of the same policy without a compiler, relative to plain eager training.
"""

from __future__ import annotations

import argparse
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from actstore import ActivationStore
from actstore.bench import workloads
from actstore.bench.trainer import relative_error
from actstore.bench.workloads.job import Job
from actstore.bench.workloads.workload import Workload
from actstore.devices import cpu_memory
from benchmarks.planner.rows import write_rows

MODELS = ("gpt", "llama", "vit", "resnet")
DTYPES = ("float32", "bfloat16")
POLICIES = ("int8", "keep")
PAIRS = 12
WARMUP_STEPS = 2  # the first one compiles


class Trained:
    """A model that trains the same batch again and again, with a policy or without one."""

    def __init__(self, work: Workload, policy: str = "", *, compiles: bool = True) -> None:
        torch._dynamo.reset()
        self._job: Job = workloads.make(work)
        self._batch = self._job.batch(0)
        self._store = ActivationStore(self._job.model, policy) if policy else None
        if compiles and self._store is not None:
            self._store.compile()
        elif compiles:
            self._job.model.compile()
        for _ in range(WARMUP_STEPS):
            self.step()

    def step(self) -> tuple[float, int, int]:
        """Return the milliseconds of forward and backward, the bytes held between them, and the peak of backward."""
        before = cpu_memory.memory_allocated() or 0
        begin = perf_counter()
        with self._store or nullcontext():
            loss = self._job.loss(*self._batch)
        held = (cpu_memory.memory_allocated() or 0) - before
        cpu_memory.reset_peak()
        loss.backward()
        ms = (perf_counter() - begin) * 1e3
        peak = (cpu_memory.max_memory_allocated() or 0) - before
        self.gradients = [weight.grad for weight in self._job.model.parameters() if weight.grad is not None]
        self._job.model.zero_grad()
        return ms, held, peak

    gradients: list[Tensor]


def rows_of(work: Workload, pairs: int) -> list[dict[str, Any]]:
    plain = Trained(work)
    _, held, peak = plain.step()
    rows = []
    for policy in POLICIES:
        mine = Trained(work, policy)
        _, my_held, my_peak = mine.step()
        bit_equal = all(map(torch.equal, mine.gradients, plain.gradients))
        row = {
            "model": work.model, "dtype": work.dtype, "policy": policy, "held": my_held, "plain_held": held,
            "peak": my_peak, "plain_peak": peak, "bit_equal": bit_equal,
            "error": relative_error(mine.gradients, plain.gradients), "eager_error": eager_error(work, policy),
        }  # fmt: skip
        ratios = []
        for _ in range(pairs):
            ms = plain.step()[0]
            ratios.append(mine.step()[0] / ms)
        rows.append(row | {"times": median(ratios), "pairs": pairs})
    return rows


def eager_error(work: Workload, policy: str) -> float:
    found, expected = (Trained(work, each, compiles=False) for each in (policy, ""))
    return relative_error(found.gradients, expected.gradients)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "model", "dtype", "policy", "held", "of plain", "peak of backward", "of plain", "times", "error", "eager"
    )
    for row in rows:
        table.add_row(
            row["model"],
            row["dtype"],
            row["policy"],
            f"{row['held'] / 2**20:.1f} MiB",
            f"{row['held'] / row['plain_held']:.2f}",
            f"{row['peak'] / 2**20:.1f} MiB",
            f"{row['peak'] / row['plain_peak']:.2f}",
            f"{row['times']:.2f}",
            "bit for bit" if row["bit_equal"] else f"{row['error']:.2%}",
            f"{row['eager_error']:.2%}",
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES, dest="dtypes")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of timed steps")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the result to this file, beside other rows")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of the compiler about itself
    torch.set_num_threads(given.threads)
    cpu_memory.install()
    cpu_memory.count()
    rows = []
    for model in given.models:
        work = workloads.sized(model, layers=given.layers, threads=given.threads)
        for dtype in given.dtypes:
            found = rows_of(replace(work, dtype=dtype), given.pairs)
            show(found)
            rows += found
    if given.json is not None:
        write_rows(given.json, rows, ("model", "dtype", "policy"))


if __name__ == "__main__":
    main()
