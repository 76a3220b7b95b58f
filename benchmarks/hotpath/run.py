"""Python cost of a saved tensor: ``python -m benchmarks.hotpath.run``.

The unit is what a pair of identity hooks, written in Python, adds to one saved tensor. Each store is given as a
multiple of it, twice:

chain   a chain of cheap operators, each saving one tensor of 4 KB, forward and backward, less the time without hooks.
        In each round all variants run once, in a new order; the figures are medians over the rounds.
direct  the same hooks called from Python without operators around them: 1 + the time beyond identity hooks over the
        unit. It has less noise, because it excludes the operators'; `LIMITS` apply to it.

A second table has microseconds for each path a tensor can take, and for a region that is recomputed. On a CPU all times
are processor time of the training thread, without other processes and the store's worker threads.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, thread_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from actstore import ActivationStore
from actstore.bench.environment import environment
from benchmarks.hotpath import paths as hotpath_paths
from benchmarks.hotpath import peers as hotpath_peers
from benchmarks.hotpath.peers import Hooks

TENSOR_SIDE = 32  # a 32 x 32 float32 tensor has 4 KB
IDENTITY = "identity hooks"
LIMITS = {"kept": 2.5, "int8": 12.0}
UNIT_REPEATS = 5  # samples of identity hooks in a round, which divide all other figures
REPEATS = 5  # of each variant in a round; the least counts, because disturbances only add


class Chain(nn.Module):
    """`length` operators that each save one 4 KB tensor: the intermediate result, or a frozen parameter each."""

    def __init__(self, length: int, of_parameters: bool, device: str) -> None:
        super().__init__()
        self.length = length
        shape = (TENSOR_SIDE, TENSOR_SIDE)
        self.x = torch.randn(shape, device=device).requires_grad_()
        frozen = [nn.Parameter(torch.rand(shape, device=device), requires_grad=False) for _ in range(length)]
        self.weights = nn.ParameterList(frozen if of_parameters else [])

    def forward(self) -> Tensor:
        y = self.x
        if not len(self.weights):
            for _ in range(self.length):
                y = y.sin()
        for weight in self.weights:
            y = y * weight
        total: Tensor = y.sum()
        return total


def variants(model: nn.Module | None, peers: dict[str, Hooks]) -> dict[str, Hooks]:
    """Return context managers by name; each store is built once and entered for each forward."""
    stores = {name: ActivationStore(model, text, min_bytes=0) for name, text in OURS.items()}
    return {
        "no hooks": nullcontext,
        IDENTITY: lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
        **{name: partial(_itself, store) for name, store in stores.items()},
        **peers,
    }


OURS = {"kept": "keep", "int8": "int8", "raw @ device": "raw"}


def _itself(store: ActivationStore) -> ActivationStore:
    return store


@dataclass(frozen=True)
class Clock:
    """Clock in seconds: on a CPU the calling thread's processor time, elsewhere the time until the device is done."""

    device: str

    def now(self) -> float:
        if torch.device(self.device).type == "cpu":
            return thread_time()
        torch.accelerator.synchronize()
        return perf_counter()


def time_chain(chain: Chain, hooks: Hooks, clock: Clock) -> float:
    """Return microseconds for one operator of the chain, forward and backward."""
    least = inf
    for _ in range(REPEATS):
        start = clock.now()
        with hooks():
            loss = chain()
        torch.autograd.backward(loss)
        least = min(least, clock.now() - start)
    return least / chain.length * 1e6


def time_direct(tensors: list[Tensor], hooks: Hooks, clock: Clock) -> float:
    """Return microseconds to pack and unpack one tensor and to free what was packed."""
    least = inf
    for _ in range(REPEATS):
        with hooks():
            mul, unpack = _top_saved_tensors_default_hooks(False)  # called as an operator that decides nothing
            start = clock.now()
            packed = [mul(t) for t in tensors]
            with torch.no_grad():
                while packed:
                    unpack(packed.pop())
            least = min(least, clock.now() - start)
    return least / len(tensors) * 1e6


def sample(jobs: dict[str, Callable[[], float]], rounds: int, often: Sequence[str] = ()) -> dict[str, list[float]]:
    """Run all jobs `rounds` times, in a new order each time, after two rounds that do not count.

    Those of `often` run UNIT_REPEATS times in each round. Figures to compare come from one run: machines change their
    speed from one second to the next.
    """
    order = [*jobs, *((UNIT_REPEATS - 1) * list(often))]
    found: dict[str, list[float]] = {name: [] for name in jobs}
    shuffle = random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for index in range(-2, rounds):
            shuffle(order)
            for name in order:
                elapsed_us = jobs[name]()
                if index >= 0:
                    found[name].append(elapsed_us)
            if index % 16 == 0:
                gc.collect()
    finally:
        gc.enable()
    return found


def measure(device: str, length: int, rounds: int) -> dict[str, Any]:
    """Return all figures: `unit_us`, and for each variant `added_us`, its quartiles, `chain` and `direct` multiples."""
    clock = Clock(device)
    activations, parameters = Chain(length, False, device), Chain(length, True, device)
    peers, left_out = hotpath_peers.find(device)
    tensors = [(activations.x + i).sin() for i in range(length)]
    packing = variants(None, peers)  # a direct call runs without a forward of a model
    del packing["no hooks"]
    found = _sample_both(activations, variants(activations, peers), tensors, packing, clock, rounds)
    rows = {name: _row(name, found) for name in packing}
    store = ActivationStore(parameters, "int8", min_bytes=0)
    some = {"no hooks": nullcontext, IDENTITY: packing[IDENTITY], "a parameter": partial(_itself, store)}
    views = [w.t() for w in parameters.weights]
    of_views = {name: hooks for name, hooks in some.items() if name != "no hooks"}
    rows["a parameter"] = _row("a parameter", _sample_both(parameters, some, views, of_views, clock, rounds))
    return {
        "unit_us": _unit_us(found), "device": device, "length": length, "rounds": rounds, "rows": rows,
        "left_out": left_out,
    }  # fmt: skip


def _sample_both(
    chain: Chain, hooks: dict[str, Hooks], tensors: list[Tensor], packing: dict[str, Hooks], clock: Clock, rounds: int
) -> dict[str, list[float]]:
    """Return times of the chain and of direct calls, by "chain " and "direct " with the name of a variant."""
    jobs = {f"chain {name}": partial(time_chain, chain, one, clock) for name, one in hooks.items()}
    direct = {f"direct {name}": partial(time_direct, tensors, one, clock) for name, one in packing.items()}
    return sample(jobs | direct, rounds, [f"chain {name}" for name in ("no hooks", IDENTITY)])


def _unit_us(found: dict[str, list[float]]) -> float:
    """Return the microseconds that identity hooks add to one operator of a chain."""
    pairs = zip(found[f"chain {IDENTITY}"], found["chain no hooks"], strict=True)
    return median(with_hooks - without for with_hooks, without in pairs)


def _row(name: str, found: dict[str, list[float]]) -> dict[str, Any]:
    """Return a variant's figures. Both are in the unit of the same run."""
    unit_us, plain = _unit_us(found), found["chain no hooks"]
    times = found[f"chain {name}"]
    added_us = [time - base for time, base in zip(times, plain[:: len(plain) // len(times)], strict=True)]
    beyond = zip(found[f"direct {name}"], found[f"direct {IDENTITY}"], strict=True)
    direct = 1 + median(mine - identity for mine, identity in beyond) / unit_us
    low, middle, high = quantiles(added_us, n=4)
    row = {"added_us": middle, "low_us": low, "high_us": high, "chain": middle / unit_us, "direct": direct}
    if name in LIMITS:
        row |= {"limit": LIMITS[name], "passed": direct <= LIMITS[name]}
    return row


def render(found: dict[str, Any]) -> Table:
    """Return the figures as a table."""
    title = f"What a saved tensor of 4 KB costs on {found['device']}; one unit is {found['unit_us']:.2f} us"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("added us", "quartiles us", "chain x", "direct x", "at most", "verdict"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in found["rows"].items():
        spread = f"{row['low_us']:.2f} .. {row['high_us']:.2f}"
        limited = "limit" in row
        table.add_row(
            name, f"{row['added_us']:.2f}", spread, f"{row['chain']:.2f}", f"{row['direct']:.2f}",
            f"{row['limit']:g}" if limited else "", ("pass" if row["passed"] else "FAIL") if limited else "",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--length", type=int, default=200, help="operators in the chain")
    parser.add_argument("--rounds", type=int, default=80, help="how often each variant runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = measure(options.device, options.length, options.rounds)
    found["paths"] = hotpath_paths.measure(options.device, options.length, options.rounds)
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": environment(), **found}, indent=2) + "\n")
    console = Console()
    console.print(render(found))
    for name, reason in found["left_out"].items():
        console.print(f"{name} is left out: {reason}", markup=False, highlight=False)
    console.print(hotpath_paths.render(found))


if __name__ == "__main__":
    main()
