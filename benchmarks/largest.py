"""The largest batch whose activations fit a budget, row by row.

A batch fits when no more than the budget is held on the device at the end of forward, which is counted for every row
alike. Held bytes grow almost in proportion to the batch, so that a line through what was measured finds the batch in a
few steps; the answer itself is always measured, and so is the next batch, which does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from matplotlib.figure import Figure

from actstore.base.units import format_nbytes
from actstore.bench.environment import environment
from actstore.bench.peers.rows import Row
from actstore.bench.result import RowResult, subject
from actstore.bench.trainer import Trainer
from actstore.bench.workloads.workload import Workload
from actstore.display import pictures as look
from benchmarks.markdown import table

ROWS = (
    "plain", "torch checkpoint", "bitsandbytes 8-bit", "int8", "int4", "int8 @ disk", "raw @ disk", "derive",
    "recompute", "recompute(int8)", "recompute(raw @ disk)",
)  # fmt: skip
PATIENCE = 8  # measured batches, after which the interval is halved


def measure(work: Workload, budget: int, most: int, chosen: list[Row], done: Callable[[dict[str, Any]], None]) -> None:
    """The largest batch of each row up to `most`, in a process for each; `done` is given the rows so far."""
    found: dict[str, Any] = {"environment": environment(), "workload": work.to_dict(), "budget": budget, "rows": []}
    for row in (row for row in chosen if not row.missing(work)):
        figures: dict[str, Any] = {"name": row.name, "kind": row.kind, "most": most, "failed": ""}
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            try:
                figures |= process.submit(_search, work, row, budget, most).result()
            except BrokenProcessPool:
                figures["failed"] = "the process is gone (often the system out of memory)"
            except Exception as error:
                figures["failed"] = f"{type(error).__name__}: {error}"
        found["rows"].append(figures)
        done(found)


def _search(work: Workload, row: Row, budget: int, most: int) -> dict[str, Any]:
    last: dict[str, Any] = {}

    def held(batch: int) -> int:
        last.update(Trainer(replace(work, batch=batch), row, None).check())
        return int(last["held_bytes"])

    batch, sizes = largest(held, budget, most)
    return {"batch": batch, "held": {str(size): sizes[size] for size in sorted(sizes)}, "bit_equal": last["bit_equal"]}


def largest(held: Callable[[int], int], budget: int, most: int) -> tuple[int, dict[int, int]]:
    """The largest batch up to `most` for which `held` is at most `budget`, 0 for none; and all that was measured."""
    sizes: dict[int, int] = {}
    low, high, guess = 0, most + 1, 1
    while low + 1 < high:
        guess = min(max(guess, low + 1), high - 1)
        sizes[guess] = held(guess)
        low, high = (guess, high) if sizes[guess] <= budget else (low, guess)
        guess = _on_the_line(sizes, budget) if len(sizes) < PATIENCE else (low + high) // 2
    return low, sizes


def _on_the_line(sizes: dict[int, int], budget: int) -> int:
    """The batch that holds the budget if the two nearest to it lie on a line; with one alone, a few times as many."""
    near = sorted(sizes, key=lambda batch: abs(sizes[batch] - budget))[:2]
    slope = (sizes[near[0]] - sizes[near[-1]]) / (near[0] - near[-1]) if len(near) > 1 else 0.0
    return int(near[0] + (budget - sizes[near[0]]) / slope) if slope > 0 else 8 * near[0]


def draw(found: dict[str, Any]) -> Figure:
    """A bar for each row, as long as its batch."""
    rows_ = [row for row in found["rows"] if not row["failed"]]
    figure = look.figure(1.7 + 0.34 * max(3, len(rows_)))
    axes = figure.add_subplot()
    kinds = [_kind(row) for row in rows_]
    axes.barh(range(len(rows_)), [row["batch"] for row in rows_], color=[look.KINDS[kind].color for kind in kinds])
    for at, row in enumerate(rows_):
        words = _words(row, _plain(found))
        axes.annotate(words, (row["batch"], at), (4, 0), textcoords="offset points", va="center", fontsize=look.SMALL)
    axes.set_yticks(range(len(rows_)), [row["name"] for row in rows_], fontsize=look.NORMAL)
    axes.set_ylim(max(3, len(rows_)) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * max([1, *(row["batch"] for row in rows_)]))
    axes.set_xlabel("batch (longer is better)")
    title = f"The largest batch with {format_nbytes(found['budget'])} of activations"
    look.heading(axes, title, f"{subject(found['workload'])}, but for the batch; held at the end of forward")
    look.clean(axes, "x")
    axes.tick_params(axis="y", length=0)
    for kind, drawn in look.KINDS.items():
        if kind in kinds:
            axes.barh([0], [0], color=drawn.color, label=drawn.label)
    if kinds:
        figure.legend(loc="outside lower center", ncols=len(look.KINDS), frameon=False, fontsize=look.NORMAL)
    return figure


def _kind(row: dict[str, Any]) -> str:
    return RowResult(row["name"], row["kind"], bit_equal=row["bit_equal"]).look


def _plain(found: dict[str, Any]) -> int:
    return next((row["batch"] for row in found["rows"] if row["kind"] == "plain" and not row["failed"]), 0)


def _words(row: dict[str, Any], plain: int) -> str:
    more = f", {row['batch'] / plain:.1f} times plain" if plain and row["kind"] != "plain" else ""
    return f"{'≥ ' if row['batch'] == row['most'] else ''}{row['batch']}{more}"


def lines(found: dict[str, Any]) -> list[str]:
    """The figures in Markdown."""
    plain = _plain(found)
    cells = [
        [row["name"], f"failed: {row['failed']}" if row["failed"] else _words(row, plain)] for row in found["rows"]
    ]
    return table([f"within {format_nbytes(found['budget'])}", "batch"], cells)
