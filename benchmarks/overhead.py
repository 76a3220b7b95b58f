"""Cost of `actstore run`: a script under it, beside the same script alone, and with a store written into it.

``python -m benchmarks.overhead`` starts each as a process that trains the GPT of the benchmark at batch 8. They take
turns step by step, in a new order each round. Times are those of the processor in all threads, as other programs of the
machine disturb these least; ratios are means over the rounds, with a 95 % interval, and so have the steps that a run
without a policy counts and those that it does not. "pages" is the script alone with the allocator that a first store
installs: only hooks and bookkeeping are left to compare. A peak is the high-water mark of a process at its end.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from contextlib import nullcontext
from math import sqrt
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter, process_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from actstore.bench.environment import environment

POLICIES = ("keep", "int8", "recompute", "raw @ disk")


class Process:
    """A process that trains a step for each line that it reads, and prints its milliseconds, and the processor's."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.times: list[tuple[float, float]] = []

    def say(self, word: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(word, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{' '.join(map(str, self._process.args))}: ended early")  # type: ignore[arg-type]
        return answer

    def step(self) -> None:
        wall, processor = self.say("step").split()
        self.times.append((float(wall), float(processor)))

    def end(self) -> int:
        """Return the high-water mark of the process in bytes."""
        peak = int(self.say("end"))
        self._process.communicate()
        return peak


def train(policy: str, batch: int) -> None:
    """Train a step for each line of stdin, under a store with `policy`; "pages" is its allocator alone, "" neither."""
    from actstore.bench import workloads
    from actstore.bench.memory import peak_rss_bytes
    from actstore.bench.trainer import cores
    from actstore.bench.workloads.workload import Workload

    torch.set_num_threads(cores())
    job = workloads.make(Workload(batch=batch))
    optimizer = torch.optim.AdamW(job.model.parameters())
    store: Any = nullcontext()
    if policy:
        from actstore import ActivationStore

        store = ActivationStore(job.model, "keep" if policy == "pages" else policy)
    if policy == "pages":
        store.close()
        store = nullcontext()
    for number, line in enumerate(sys.stdin):
        if line.strip() == "end":
            break
        data, start, worked = job.batch(number), perf_counter(), process_time()
        with store:
            loss = job.model(*data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print((perf_counter() - start) * 1e3, (process_time() - worked) * 1e3, flush=True)
    print(peak_rss_bytes(), flush=True)


def measure(batch: int, rounds: int, warmup: int = 5) -> dict[str, Any]:
    """Return step times and peaks of all processes, and what a run costs beyond the script alone."""
    script = [str(Path(__file__)), "--batch", str(batch), "--train"]
    rows = {"plain": Process(*script, ""), "pages": Process(*script, "pages")}
    for policy in POLICIES:
        rows[f"with store: {policy}"] = Process(*script, policy)
        rows[f"run: {policy}"] = Process("-m", "actstore", "run", "--policy", policy, *script, "")
    timed = ["plain", "pages", "with store: keep", "run: keep"]
    shuffle = random.Random(0).shuffle
    for count, names in ((warmup, list(rows)), (rounds, timed)):
        for _ in range(count):
            shuffle(names)
            for name in names:
                rows[name].step()
    found: dict[str, Any] = {"batch": batch, "rounds": rounds, "environment": environment(), "rows": {}}
    for name, row in rows.items():
        found["rows"][name] = {"peak_bytes": row.end()}
        if name in timed:
            wall, processor = (median(column) for column in zip(*row.times[warmup:], strict=True))
            found["rows"][name] |= {"step_ms": wall, "processor_ms": processor}
    for other in ("pages", "with store: keep"):
        pairs = zip(rows["run: keep"].times[warmup:], rows[other].times[warmup:], strict=True)
        found[f"keep / {other}"] = interval([one / two for (_, one), (_, two) in pairs])
    found["peaks"] = {
        policy: found["rows"][f"run: {policy}"]["peak_bytes"] / found["rows"][f"with store: {policy}"]["peak_bytes"]
        for policy in POLICIES
    }
    return found


def interval(ratios: list[float]) -> dict[str, float]:
    """Return the mean with a 95 % interval."""
    middle, half = mean(ratios), 1.96 * stdev(ratios) / sqrt(len(ratios))
    return {"mean": middle, "low": middle - half, "high": middle + half}


def main() -> None:
    """Measure and print; with ``--json`` write a file, too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.train is not None:
        train(flags.train, flags.batch)
        return
    found = measure(flags.batch, flags.rounds)
    table = Table("process", "step, ms", "of the processor", "peak, MiB")
    for name, row in found["rows"].items():
        times = [f"{row[key]:.0f}" if key in row else "" for key in ("step_ms", "processor_ms")]
        table.add_row(name, *times, f"{row['peak_bytes'] / 2**20:,.0f}")
    Console().print(table)
    for other in ("pages", "with store: keep"):
        ratio = found[f"keep / {other}"]
        print(f"run: keep / {other}: {ratio['mean']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})")
    print("peaks, run / with store:", {policy: round(ratio, 3) for policy, ratio in found["peaks"].items()})
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
