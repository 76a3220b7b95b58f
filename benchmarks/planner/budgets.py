"""Training of a GPT and an LSTM cell by "auto" under five budgets each: ``python -m benchmarks.planner.budgets``.

For each budget a fresh store measures and plans while the model trains, and runs its plan. Then, on the same model,
steps of the plan take turns with steps of every policy written by hand that is as exact and holds no more: "its time"
is that of the fastest of them, as a multiple of the plan's. "predicted" is the plan's own figure, against steps that
ran after it was made; "times plain" is against plain steps that took turns with those. Times are medians; "peak" is the
most that a step held, over the budget. The store refuses a share that is too small and names the least possible
budget, which then runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from actstore import ActivationStore, Auto
from actstore.base.units import format_nbytes
from actstore.bench import workloads
from actstore.bench.environment import environment
from actstore.bench.workloads.text import Batches, vocabulary
from actstore.bench.workloads.workload import Workload
from actstore.errors import CapacityError

SHARES = (0.1, 0.25, 0.4, 0.6, 0.8)
PLAN_LIMIT_STEPS = 80  # steps in which a plan must appear
SETTLED_STEPS = 6  # steps with a plan before the timing starts: the store may notice a wrong plan and plan again

Step = Callable[[AbstractContextManager[object]], None]


class Recurrent(nn.Module):
    """Prediction of characters with an LSTM cell, one call a character: ``model(x, y)`` is the mean cross entropy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(vocabulary()), width)
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, len(vocabulary()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        e = self.embed(x)
        h = c = e.new_zeros(len(x), e.shape[-1])
        outputs = []
        for t in range(x.shape[1]):
            h, c = self.cell(e[:, t], (h, c))
            outputs.append(h)
        return nn.functional.cross_entropy(self.head(torch.stack(outputs, 1)).flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class Case:
    """A model, one step of its training under a store, and the policies that a user would write."""

    name: str
    model: nn.Module
    step: Step
    by_hand: tuple[str, ...]
    rounds: int


@dataclass(frozen=True)
class Row:
    """One budget; times in ms, sizes in bytes.

    Attributes
    ----------
    share : budget as a fraction of plain training's peak
    refused : whether the share was less than the least possible budget, which is then the budget
    plain : the plan's prediction of plain's time
    plain_measured : time of plain steps that took turns with those of the plan
    best, best_ratio : the fastest policy by hand within the budget, and its time over that of the plan's step before it
    """

    case: str
    share: float
    budget: int
    refused: bool
    steps: int
    peak: int
    predicted: float
    measured: float
    plain: float
    plain_measured: float
    bound: float | None
    best: str
    best_ratio: float | None
    policy: str


def gpt(threads: int) -> Case:
    work = Workload(threads=threads)
    job = workloads.make(work)
    halves = "blocks.*.attn : recompute", "blocks.*.mlp : recompute"
    derived = "derive", "blocks.0 : recompute; * : derive", f"{halves[1]}; * : derive"
    by_hand = ("keep", "recompute", "expack", *halves, "; ".join(halves), *derived)
    return _case("GPT, 6 layers, width 256", job.model, job.batch, by_hand, 7)


def lstm(steps: int) -> Case:
    work = Workload(context=steps, batch=8)
    torch.manual_seed(0)
    model, batches = Recurrent(128), Batches(work)
    schedules = ("segment=8", "schedule=sqrt", "schedule=revolve, slots=10")
    by_hand = ("keep", "cell : recompute", *(f"cell : recompute({text})" for text in schedules))
    return _case(f"LSTM cell, {steps} steps, width 128", model, batches, by_hand, 5)


def _case(
    name: str, model: nn.Module, batch: Callable[[int], tuple[Tensor, ...]], by_hand: tuple[str, ...], rounds: int
) -> Case:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    count = iter(range(10**9))

    def step(store: AbstractContextManager[object]) -> None:
        optimizer.zero_grad()
        with store:
            loss = model(*batch(next(count)))
        loss.backward()
        optimizer.step()

    return Case(name, model, step, by_hand, rounds)


def timed(case: Case, store: ActivationStore) -> tuple[float, int]:
    """Return milliseconds of a step, and its peak of held bytes."""
    begin = perf_counter()
    case.step(store)
    ms = (perf_counter() - begin) * 1e3
    return ms, store.report().peak_held_bytes


def planned(case: Case, budget: int) -> tuple[ActivationStore, int]:
    """Return a store that runs its plan, and the number of steps until the plan."""
    store = ActivationStore(case.model, Auto(budget), min_bytes=0)
    for steps in range(1, PLAN_LIMIT_STEPS):
        case.step(store)
        if store.plan is not None:
            for _ in range(SETTLED_STEPS):
                case.step(store)
            return store, steps
    raise SystemExit(f"no plan after {PLAN_LIMIT_STEPS} steps")


def run(case: Case, share: float, plain_peak: int, hand: dict[str, tuple[ActivationStore, int]]) -> Row:
    budget, refused = int(share * plain_peak), False
    try:
        store, steps = planned(case, budget)
    except CapacityError as error:
        budget, refused = int(1.001 * error.facts["least"]), True
        store, steps = planned(case, budget)
    plan = store.plan
    assert plan is not None
    rivals = {policy: other for policy, (other, peak) in hand.items() if peak <= budget}
    mine, plain, theirs, peaks = [], [], {policy: [] for policy in rivals}, [0]
    for _ in range(case.rounds):
        plain.append(timed(case, hand["keep"][0])[0])
        mine.append(timed(case, store))
        for policy, other in rivals.items():
            theirs[policy].append(timed(case, other)[0] / mine[-1][0])
            mine.append(timed(case, store))
    peaks += [peak for _, peak in mine]
    measured = median(ms for ms, _ in mine)
    best = min(theirs, key=lambda policy: median(theirs[policy]), default="")
    ratio = median(theirs[best]) if best else None
    return Row(
        case.name, share, budget, refused, steps, max(peaks), plan.predicted.step, measured, plan.plain, median(plain),
        plan.bound, best, ratio, plan.text,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["gpt", "lstm"], help="one of the two models")
    parser.add_argument("--steps", type=int, default=1000, help="calls of the LSTM's cell in a training step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the result to this file, beside rows of other models")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[Row] = []
    for name, make in (("gpt", lambda: gpt(arguments.threads)), ("lstm", lambda: lstm(arguments.steps))):
        if arguments.only in (None, name):
            case = make()
            hand = {}
            for policy in case.by_hand:
                store = ActivationStore(case.model, policy, min_bytes=0)
                hand[policy] = (store, max(timed(case, store)[1] for _ in range(2)))
            for share in SHARES:
                rows.append(run(case, share, hand["keep"][1], hand))
                show(rows[-1:])
                if arguments.json is not None:
                    write(arguments.json, rows)
    show(rows)


def write(path: Path, rows: list[Row]) -> None:
    """Write rows, beside those of other models."""
    new = {row.case for row in rows}
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    others = [row for row in old if row["case"] not in new]
    values = {"environment": environment(), "rows": [*others, *map(asdict, rows)]}
    path.write_text(json.dumps(values, indent=1) + "\n")


def show(rows: list[Row]) -> None:
    table = Table("model", "budget", "share", "peak", "step ms", "times plain", "predicted", "best by hand", "its time")
    for row in rows:
        table.add_row(
            row.case,
            f"{format_nbytes(row.budget)}{' (least)' if row.refused else ''}",
            f"{row.share:.0%}",
            f"{row.peak / row.budget:.1%}",
            f"{row.measured:.0f}",
            f"{row.measured / row.plain_measured:.2f}",
            f"{row.predicted / row.measured - 1:+.1%}",
            row.best or "none fits",
            f"{row.best_ratio:.2f}" if row.best_ratio is not None else "",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
