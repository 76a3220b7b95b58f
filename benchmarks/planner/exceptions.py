"""Gain of plans by exceptions from recomputed blocks: ``python -m benchmarks.planner.exceptions gpt llama vit resnet``.

A model trains by "auto" until it has a plan. The figures that this has measured are solved twice, with exceptions and
without, under the same budget. Where the plans differ, both run as rules, and their steps take turns: "time" is the
median of the ratios, with exceptions over without; "predicted" is that of the solver. A budget that is refused without
exceptions is replaced by the least one.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

from actstore import ActivationStore, Auto
from actstore.base.units import format_nbytes
from actstore.bench import workloads
from actstore.bench.environment import environment
from actstore.errors import CapacityError
from actstore.plan.build import chain_of, limits_of, policy_of
from actstore.plan.decisions import excepted_part
from actstore.plan.profile import Profile
from actstore.plan.solver.solve import solve

SHARES = (0.25, 0.4, 0.6)
PLAN_LIMIT_STEPS = 80  # steps in which a plan must appear
BATCHES = {"gpt": 2, "llama": 2, "vit": 8, "resnet": 8}


@dataclass(frozen=True)
class Row:
    """One budget; times in ms, sizes in bytes.

    Attributes
    ----------
    share : budget as a fraction of plain training's peak
    without, policy : the plan without exceptions, and the one with them
    predicted_without, predicted : the solver's time of a step of each
    plain : time of a step that keeps everything
    ratio : time with exceptions over time without; None where the plans are one
    peak : peak of a step with exceptions
    """

    model: str
    share: float
    budget: int
    without: str
    policy: str
    predicted_without: float
    predicted: float
    plain: float
    ratio: float | None
    peak: int


class Training:
    """A model, and steps of its training under stores."""

    def __init__(self, name: str) -> None:
        self._job = workloads.make(workloads.sized(name, batch=BATCHES[name]))
        self._optimizer = torch.optim.SGD(self._job.model.parameters(), 1e-4)
        self._count = 0

    def store(self, policy: str | Auto) -> ActivationStore:
        return ActivationStore(self._job.model, policy, min_bytes=0)

    def step(self, store: ActivationStore) -> tuple[float, int]:
        """Run a step. Returns its milliseconds and the peak of its held bytes."""
        self._count += 1
        begin = perf_counter()
        self._optimizer.zero_grad()
        with store:
            loss = self._job.model(*self._job.batch(self._count))
        loss.backward()
        self._optimizer.step()
        return (perf_counter() - begin) * 1e3, store.report().peak_held_bytes

    def measured(self, budget: int) -> Profile:
        """Train by "auto" until it has a plan. Returns its measurements."""
        store = self.store(Auto(budget))
        for _ in range(PLAN_LIMIT_STEPS):
            self.step(store)
            if store.plan is not None:
                return store.plan.profile
        raise SystemExit(f"no plan after {PLAN_LIMIT_STEPS} steps")


def plan_of(profile: Profile, budget: int) -> tuple[str, float]:
    """Return the fastest exact plan on the device, as rules, and its predicted milliseconds."""
    chain = chain_of(profile)
    solution = solve(chain, limits_of(budget, 0, 0, 0.0))
    return policy_of(chain, solution.choice), solution.evaluation.total


def without_exceptions(profile: Profile) -> Profile:
    figures = {
        kind: {decision: found for decision, found in by_decision.items() if not excepted_part(decision)}
        for kind, by_decision in profile.figures.items()
    }
    return replace(profile, figures=figures)


def run(name: str, share: float, rounds: int) -> Row:
    training = Training(name)
    keep = training.store("keep")
    budget = int(share * max(training.step(keep)[1] for _ in range(2)))
    try:
        profile = training.measured(budget)
        old, old_ms = plan_of(without_exceptions(profile), budget)
    except CapacityError as error:
        budget = int(1.001 * int(error.facts["least"]))
        profile = training.measured(budget)
        old, old_ms = plan_of(without_exceptions(profile), budget)
    new, new_ms = plan_of(profile, budget)
    stores = training.store(old), training.store(new)
    for _ in range(3):
        for store in stores:
            training.step(store)
    plain, ratios, peak = [], [], 0
    for turn in range(rounds):
        plain.append(training.step(keep)[0])
        first, second = (0, 1) if turn % 2 else (1, 0)
        times = {each: training.step(stores[each]) for each in (first, second)}
        ratios.append(times[1][0] / times[0][0])
        peak = max(peak, times[1][1])
    ratio = None if old == new else median(ratios)
    return Row(name, share, budget, old, new, old_ms, new_ms, median(plain), ratio, peak)


def show(rows: list[Row]) -> None:
    table = Table("model", "budget", "share", "peak", "predicted", "time", "plan with exceptions")
    for row in rows:
        table.add_row(
            row.model,
            format_nbytes(row.budget),
            f"{row.share:.0%}",
            f"{row.peak / row.budget:.1%}",
            f"{row.predicted / row.predicted_without:.3f}",
            "the same plan" if row.ratio is None else f"{row.ratio:.3f}",
            row.policy.replace("\n", "; "),
        )
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=tuple(BATCHES))
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of plain's peak (0.25 0.4 0.6)")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each plan (15)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows to this file, beside those of other models")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[Row] = []
    for name in arguments.models:
        for share in arguments.shares:
            rows.append(run(name, share, arguments.rounds))
            show(rows[-1:])
            if arguments.json is not None:
                write(arguments.json, rows)
    show(rows)


def write(path: Path, rows: list[Row]) -> None:
    found = json.loads(path.read_text())["rows"] if path.exists() else []
    names = {row.model for row in rows}
    kept = [row for row in found if row["model"] not in names]
    result = {"environment": environment(), "rows": [*kept, *map(asdict, rows)]}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
