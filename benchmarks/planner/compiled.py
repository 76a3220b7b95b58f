"""Peaks and times of compiled models under a budget: ``python -m benchmarks.planner.compiled gpt --layers 2``.

Each budget is a share of the peak of plain compilation. A budget that is refused names the least possible one, which
then runs in its place. Peaks are those of the allocator's count, above what was there before forward, gradients
included; the first step compiles, and is not counted. Steps of the plan take turns with plain steps: "times plain" is
the median of the ratios.

With `--disk` plans may let saved tensors wait in a file. With `--noise` they may encode some with a loss: eager steps
within the first budget measure its effect, and later budgets go on with the state. "error" is the relative error of all
gradients of a step.

With `--rivals` the budgets are the peaks of PyTorch's `activation_memory_budget`, whose steps take turns, too.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from actstore import ActivationStore, Auto, Disk
from actstore.base.units import format_nbytes
from actstore.bench import workloads
from actstore.bench.trainer import relative_error
from actstore.bench.workloads.job import Job
from actstore.bench.workloads.workload import Workload
from actstore.devices import cpu_memory
from actstore.errors import CapacityError
from benchmarks.planner.rival import rival
from benchmarks.planner.rows import write_rows

SHARES = (0.6, 0.4, 0.25)
MAX_EAGER_STEPS = 100


def step(job: Job, store: ActivationStore | None, number: int = 0) -> tuple[float, int]:
    """Return the milliseconds of forward and backward, and the peak of a step on the batch of this number."""
    batch = job.batch(number)
    before = cpu_memory.memory_allocated() or 0
    cpu_memory.reset_peak()
    begin = perf_counter()
    with store or nullcontext():
        loss = job.loss(*batch)
    loss.backward()
    ms = (perf_counter() - begin) * 1e3
    peak = (cpu_memory.max_memory_allocated() or 0) - before
    job.model.zero_grad()
    return ms, peak


def gradients(job: Job, store: ActivationStore | None) -> list[Tensor]:
    """Return the gradients of a step."""
    torch.manual_seed(0)
    with store or nullcontext():
        loss = job.loss(*job.batch(0))
    loss.backward()
    found = [weight.grad for weight in job.model.parameters() if weight.grad is not None]
    job.model.zero_grad()
    return found


def compiled(
    work: Workload,
    backend: str | Callable[..., Any],
    budget: int | None,
    disk: str = "",
    noise: float = 0.0,
    state: dict[str, Any] | None = None,
) -> tuple[Job, ActivationStore | None, int]:
    """Return a compiled model, its store, and the peak of its second step.

    disk : budget of the disk that plans may use; empty for none
    noise : variance that payloads may add to gradients, as a fraction of that from batch to batch
    state : of a store that has measured its effect
    """
    torch._dynamo.reset()
    job = workloads.make(work)
    tiers = [Disk(budget=disk)] if disk else []
    store = None if budget is None else ActivationStore(job.model, Auto(budget, noise), tiers=tiers)
    if store is None:
        job.model.compile(backend=backend)
    else:
        store.compile(backend=backend)
        if state is not None and noise:
            store.load_state_dict(state)
    for number in range(MAX_EAGER_STEPS):  # the last one compiles, and measures operators
        step(job, store, number)
        if store is None or store.graph_plan is not None:
            break
    return job, store, step(job, store)[1]


def run(
    work: Workload, backend: str, rounds: int, shares: list[float], disk: str, noise: float
) -> list[dict[str, Any]]:
    plain, _, plain_peak = compiled(work, backend, None)
    rows, state = [], None
    for share in shares:
        row, state = row_of(
            work, backend, rounds, share, plain, plain_peak, int(share * plain_peak), disk, noise, state
        )
        rows.append(row)
    return rows


def run_rivals(
    work: Workload, backend: str, rounds: int, shares: list[float], disk: str, noise: float
) -> list[dict[str, Any]]:
    plain, _, plain_peak = compiled(work, backend, None)
    rows = []
    for share in shares:
        theirs, _, peak = compiled(work, rival(share, backend), None)
        of_plain = peak / plain_peak
        row, _ = row_of(work, backend, rounds, of_plain, plain, plain_peak, peak, disk, noise, theirs=theirs)
        rows.append(row | {"rival": share, "rival_peak": peak})
    return rows


def row_of(
    work: Workload,
    backend: str,
    rounds: int,
    share: float,
    plain: Job,
    plain_peak: int,
    budget: int,
    disk: str,
    noise: float,
    state: dict[str, Any] | None = None,
    theirs: Job | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    refused = False
    try:
        job, store, peak = compiled(work, backend, budget, disk, noise, state)
    except CapacityError as error:
        budget, refused = error.facts["least"], True
        job, store, peak = compiled(work, backend, budget, disk, noise, state)
    assert store is not None
    plan: Any = store.graph_plan
    ratios, rivals = [], []
    for other in (plain, theirs):
        if other is not None:
            step(other, None)  # compiles again, since the compiler was reset for the plan
    for _ in range(rounds):
        ms = step(plain, None)[0]
        mine, now = step(job, store)
        ratios.append(mine / ms)
        peak = max(peak, now)
        if theirs is not None:
            rivals.append(step(theirs, None)[0] / ms)
    row = {
        "model": work.model, "layers": work.layers, "batch": work.batch, "backend": backend, "share": share,
        "allocator": str(cpu_memory.status()), "budget": budget, "refused": refused, "peak": peak,
        "predicted_peak": plan.predicted_peak, "plain_peak": plain_peak, "times": median(ratios),
        "predicted_times": plan.times_plain, "held": plan.held, "plain_held": plan.plain_held,
    }  # fmt: skip
    row |= {"disk": disk, "away": plan.away, "window": plan.window} if disk else {}
    if noise:
        row |= {"max_noise": noise, "noise": plan.noise, "encoded": plan.encoded}
        row |= {"error": relative_error(gradients(job, store), gradients(plain, None))}
    row |= {"rival_times": median(rivals)} if rivals else {}
    show([row])
    return row, store.state_dict()


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "model",
        "backend",
        "share",
        "budget",
        "peak",
        "of the budget",
        "predicted",
        "times plain",
        "predicted",
        "rival",
        "away",
        "encoded",
        "error",
    )
    for row in rows:
        table.add_row(
            row["model"],
            row["backend"],
            f"{row['share']:.0%}",
            f"{format_nbytes(row['budget'])}{' (least)' if row['refused'] else ''}",
            format_nbytes(row["peak"]),
            f"{row['peak'] / row['budget']:.1%}",
            f"{row['predicted_peak'] / row['peak'] - 1:+.1%}",
            f"{row['times']:.2f}",
            f"{row['predicted_times']:.2f}",
            f"{row['rival_times']:.2f}" if "rival_times" in row else "",
            format_nbytes(row["away"]) if "away" in row else "",
            format_nbytes(row["encoded"]) if "encoded" in row else "",
            f"{row['error']:.2%}" if "error" in row else "",
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["gpt", "llama", "vit", "resnet"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--backend", choices=["aot_eager", "inductor"], default="inductor")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of timed steps")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--rivals", type=float, nargs="+", help="PyTorch's budgets, in place of shares of the peak")
    parser.add_argument("--disk", default="", metavar="BUDGET", help="bytes of a file that plans may use: 8GiB")
    parser.add_argument("--noise", type=float, default=0.0, help="that payloads may add to gradients: 0.1")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the result to this file, beside other rows")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of the compiler about itself
    torch.set_num_threads(given.threads)
    cpu_memory.install()
    cpu_memory.count()
    work = workloads.sized(given.model, layers=given.layers, batch=given.batch, threads=given.threads)
    if given.rivals:
        rows = run_rivals(work, given.backend, given.rounds, given.rivals, given.disk, given.noise)
    else:
        rows = run(work, given.backend, given.rounds, list(given.shares), given.disk, given.noise)
    if given.json is not None:
        write_rows(given.json, rows, ("model", "backend", "rival", "share", "disk", "max_noise"))


if __name__ == "__main__":
    main()
