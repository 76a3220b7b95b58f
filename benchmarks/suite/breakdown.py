"""Breakdown of a step's time under each policy, from the traces of the store.

All policies take turns on one model in one process. "forward and backward" is the rest of the step, without the
optimizer, recomputation, codecs and stalls: the model's own work, the hooks, and the slowdown by copies beside
it. Medians over the rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from time import perf_counter_ns
from typing import Any

from matplotlib.figure import Figure

from actstore import ActivationStore, Trace
from actstore.bench import workloads
from actstore.bench.environment import environment
from actstore.bench.result import subject
from actstore.bench.trainer import fix_numerics, fix_seed
from actstore.bench.workloads.job import Job
from actstore.bench.workloads.workload import Workload
from actstore.display import pictures as look
from actstore.trace import Event
from actstore.trace.summary import Spans, difference, total, union
from benchmarks.markdown import table

POLICIES = (
    "raw @ host", "raw @ disk", "expack", "int8", "int8 @ disk", "int4", "recompute", "recompute(raw @ disk)",
)  # fmt: skip
PARTS = ("stall", "decode", "encode", "recompute")  # where spans overlap, the first part in this order counts
REST = "forward and backward"
WARMUP = 2


def measure(work: Workload, rounds: int, done: Callable[[dict[str, Any]], None]) -> None:
    """Measure the figures, and pass them to `done`."""
    fix_numerics(work)
    job = workloads.make(work)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in ("plain", *POLICIES)}
    with ExitStack() as stack:
        stores = {policy: ActivationStore(job.model, policy, observe=[Trace()]) for policy in POLICIES}
        for store in stores.values():
            stack.callback(store.close)
        for turn in range(-WARMUP, rounds):
            for name, found in samples.items():
                parts = _step(job, stores.get(name))
                if turn >= 0:
                    found.append(parts)
    rows = [
        {"name": name, **{part: median(sample[part] for sample in found) for part in (REST, *PARTS)}}
        for name, found in samples.items()
    ]
    done({"environment": environment(), "workload": work.to_dict(), "rounds": rounds, "rows": rows})


def _step(job: Job, store: ActivationStore | None) -> dict[str, float]:
    """Run one step, and return milliseconds of its parts."""
    job.model.zero_grad()
    fix_seed(job.work.seed)
    batch = job.batch(0)
    begin = perf_counter_ns()
    with ExitStack() as stack:
        if store is not None:
            stack.enter_context(store)
        loss = job.loss(*batch)
    job.backward(loss)
    end = perf_counter_ns()
    events = [] if store is None else store.trace.events(store.trace.last_step())
    return parts_of(events, begin, end)


def parts_of(events: list[Event], begin_ns: int, end_ns: int) -> dict[str, float]:
    """Return milliseconds of each part between two moments; they add up to all of the time."""
    taken: Spans = []
    found = {}
    for part in PARTS:
        spans = union(
            (max(e.begin_ns, begin_ns), min(e.end_ns, end_ns))
            for e in events
            if e.kind == part and e.begin_ns < end_ns and e.end_ns > begin_ns
        )
        found[part] = total(difference(spans, taken)) / 1e6
        taken = union([*taken, *spans])
    return {REST: (end_ns - begin_ns - total(taken)) / 1e6, **found}


def draw(found: dict[str, Any]) -> Figure:
    """Draw a bar for each policy, its parts one after the other."""
    rows = found["rows"]
    figure = look.figure(1.9 + 0.36 * len(rows))
    axes = figure.add_subplot()
    starts = [0.0] * len(rows)
    colors = {REST: look.TIMES["forward"], **{part: look.TIMES[part] for part in reversed(PARTS)}}
    for part, color in colors.items():
        axes.barh(range(len(rows)), [row[part] for row in rows], left=starts, color=color, label=part, height=0.72)
        starts = [start + row[part] for start, row in zip(starts, rows, strict=True)]
    for at, end in enumerate(starts):
        axes.annotate(f"{end:.0f}", (end, at), (4, 0), textcoords="offset points", va="center", fontsize=look.SMALL)
    axes.axvline(starts[0], color=look.RULE, linewidth=1, zorder=0)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=look.NORMAL)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.07 * max(starts))
    axes.set_xlabel("ms of a step, without the optimizer (shorter is faster)")
    look.heading(axes, "Where the time of a step goes", subject(found["workload"]))
    look.clean(axes, "x")
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=len(colors), frameon=False, fontsize=look.NORMAL)
    return figure


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures in Markdown."""
    parts = (REST, *reversed(PARTS))
    rows = [
        [row["name"], *(f"{row[part]:.1f}" if row[part] else "" for part in parts), f"{sum(row[p] for p in parts):.0f}"]
        for row in found["rows"]
    ]
    return table(["ms", *parts, "in all"], rows)
