"""Blocks of an 8B-class Llama under every store and peer: ``python -m benchmarks.gpu.llama --json FILE --plot FILE``.

Width 4096, 32 heads, 8 key-value heads, SwiGLU of 14336, one sequence of 8,192 tokens, weights and activations in
bfloat16. A step is forward and backward; each has a plain step right before or after it, in turn. All rows run in one
process on one model; figures are medians. The results so far are written after each row. ``--lora`` has all
32 layers of the model and the vocabulary of Llama 3, frozen but for adapters, and the rows that say more there.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from actstore import ActivationStore
from actstore.bench.trainer import relative_error
from actstore.errors import CapacityError
from benchmarks.gpu import place as gpu_place
from benchmarks.gpu.chain import pinned_segments
from benchmarks.gpu.device import ceilings
from benchmarks.gpu.llama_model import Job, Sizes, deterministic
from benchmarks.gpu.llama_rows import KEEP, LORA_ROWS, PLAIN, ROWS, Enter, Row, entered
from benchmarks.gpu.place import Sheet, medians

WARMUP, REPEATS = 3, 5  # steps; the first allocates and compiles, the second knows the order
SETTLE_S, SETTLE_STEPS = 40.0, 96  # for "auto" to measure and plan
SKIPPED_IN_DRY_RUN = (
    "auto 50 %",
    "save_on_cpu",
    "raw @ host",
    "int8",
    "recompute(raw @ host)",
)  # left out of a dry run, which has similar rows
ENERGY_S = 1.0  # of steps: the counter of energy moves ten times a second
LEAST_BUDGET_FACTOR = 1.01  # times the least possible budget, where a share is refused
REPORT_FIELDS = ("saved_bytes", "stored_bytes", "peak_held_bytes", "offload_ms", "fetch_ms", "stall_ms")

Found = dict[str, Any]


class Bench:
    """One job, its plain gradients, and the figures found. Gradients that two plain steps repeat are compared.

    Attributes
    ----------
    found : the figures as they are written
    """

    def __init__(self, job: Job, sheet: Sheet) -> None:
        self.place, self.job, self.sheet = job.place, job, sheet
        place = job.place
        self.found = sheet.found
        self.found |= {"dry_run": not place.on_gpu, **job.about}
        self.found["parameter_bytes"] = self.job.parameter_nbytes
        self.found["link"] = {name: flow["gbps"] for name, flow in ceilings(place).items() if name != "nbytes"}
        self.job.step(nullcontext())
        first = [g.clone() for g in self.job.gradients()]
        self.job.step(nullcontext())
        self._expected = [g.clone() for g in self.job.gradients()]
        if not all(bool(grad.isfinite().all()) for grad in first):
            raise RuntimeError("the gradients of a plain step are not finite")
        self._repeats = [torch.equal(a, b) for a, b in zip(first, self._expected, strict=True)]
        self.found["unrepeated"] = self._repeats.count(False)
        del first
        self._plain: list[Found] = []
        gc.freeze()  # each sample collects what steps have left

    def run(self, row: Row) -> Found:
        """Return the figures of a row; `failed` is the reason where it has none."""
        figures: Found = {"name": row.name, "kind": row.kind, "exact": row.exact}
        try:
            figures |= self._planned(row) if row.share else self._trained(row, 0)
        except Exception as error:  # the remaining rows run
            figures["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
        self.job.model.zero_grad(set_to_none=True)
        gc.collect()  # frees what an error's traceback held
        self.place.empty_cache()
        return figures

    def plain(self) -> Found:
        """Return the row of the plain steps that ran beside the other rows."""
        figures: Found = {"name": PLAIN.name, "kind": PLAIN.kind, "exact": True, "grad_error": 0.0, "equal": True}
        if not self._plain:
            return self.found.get("plain", figures | {"failed": "no step ran"})
        figures |= medians(self._plain) | {"ratio": 1.0}
        figures["saved_bytes"] = self._kept().get("saved_bytes")
        if not self.place.on_gpu:
            figures["held_bytes"] = figures["saved_bytes"]
        return figures

    def _kept(self) -> Found:
        return next((row for row in self.found["rows"] if row["name"] == KEEP.name), {})

    def _planned(self, row: Row) -> Found:
        """Run under the row's share of `keep`'s peak, or under the least possible budget."""
        if "peak_held_bytes" not in self._kept():
            raise RuntimeError("a share of what keep holds at its peak, and keep did not run")
        budget = int(row.share * self._kept()["peak_held_bytes"])
        try:
            return {"budget": budget, **self._trained(row, budget)}
        except CapacityError as error:
            least = int(LEAST_BUDGET_FACTOR * error.facts["least"])
        return {"budget": least, "refused": budget, **self._trained(row, least)}

    def _trained(self, row: Row, budget: int) -> Found:
        with entered(row, self.job, budget) as (enter, store):
            settled = self._settled(store) if budget and store is not None else {}
            return settled | self._measured(enter, store)

    def _settled(self, store: ActivationStore) -> Found:
        """Train until the plan exists and has been measured."""
        end, steps = monotonic() + SETTLE_S, 0
        while (plan := store.plan) is None or plan.measured is None:
            if steps == SETTLE_STEPS or monotonic() > end:
                raise RuntimeError(f"no plan was there and measured after {steps} steps")
            self.job.step(store)
            steps += 1
        return {"settled_after": steps}

    def _measured(self, enter: Enter, store: ActivationStore | None) -> Found:
        first_ms = self.place.elapsed_ms(lambda: self.job.step(enter()))
        for _ in range(WARMUP - 1):
            self.job.step(enter())
        found = self.job.gradients()
        error = relative_error(found, self._expected)
        pairs = zip(found, self._expected, self._repeats, strict=True)
        equal = all(torch.equal(a, b) for a, b, repeats in pairs if repeats)
        del found
        samples = []
        for repeat in range(self.place.sized(REPEATS, 2)):
            pair: dict[str, Found] = {}
            for name in ("plain", "row")[:: 1 if repeat % 2 else -1]:
                pair[name] = self._sample(nullcontext if name == "plain" else enter, store if name == "row" else None)
            self._plain.append(pair["plain"])
            samples.append(pair["row"] | {"ratio": pair["row"]["step_ms"] / pair["plain"]["step_ms"]})
        figures: Found = {"grad_error": error, "equal": equal, **medians(samples), "samples": samples}
        figures["first_ms"] = first_ms
        if store is not None and (pinned := sum(map(sum, pinned_segments(store)))):
            figures["pinned_bytes"] = pinned
        figures |= self._reserved(enter)
        if store is not None and (plan := store.plan) is not None:
            figures |= {"predicted_ms": plan.predicted.step, "predicted_bytes": int(plan.predicted.peak)}
            figures |= {"bound_ms": plan.bound, "policy": plan.text, "rival": plan.rival}
        return figures

    def _reserved(self, enter: Enter) -> Found:
        """Return the peak of what the allocator takes for some steps, without memory that plain steps have left, and
        their energy, each where the GPU tells it.
        """
        self.job.model.zero_grad(set_to_none=True)
        gc.collect()
        self.place.empty_cache()
        self.place.reset_peak()
        before, end, steps = self.place.energy_j(), monotonic() + self.place.sized(ENERGY_S, 0.0), 0
        while steps < 2 or monotonic() < end:
            self.job.step(enter())
            self.place.synchronize()
            steps += 1
        figures: Found = {}
        if self.place.on_gpu:
            figures["reserved_bytes"] = self.place.reserved() - sum(g.nbytes for g in self._expected)
        if before is not None and (after := self.place.energy_j()) is not None:
            figures["energy_j"] = (after - before) / steps
        return figures

    def _sample(self, enter: Enter, store: ActivationStore | None) -> Found:
        """Run one step; return milliseconds, bytes, and the store's figures."""
        place, job, held = self.place, self.job, 0
        job.model.zero_grad(set_to_none=True)
        gc.collect()
        before = place.allocated()

        def step() -> None:
            nonlocal held
            with enter():
                loss = job.forward()
            held = place.allocated() - before
            job.backward(loss)

        place.reset_peak()
        figures: Found = {"step_ms": place.elapsed_ms(step)}
        if place.on_gpu:
            reference = sum(g.nbytes for g in self._expected)
            figures |= {"held_bytes": held, "peak_bytes": place.peak() - reference}
        if store is not None:
            report = store.report()
            figures |= {name: getattr(report, name) for name in REPORT_FIELDS}
            figures["host_bytes"] = sum(medium.peak_bytes for medium in report.media if medium.tier == "host")
            if not place.on_gpu:
                figures["held_bytes"] = report.held_bytes
        return figures


def run_all(bench: Bench, rows: Iterable[Row]) -> Found:
    """Run each row that has no figures of this commit, and save after each."""
    by_name = {row.name: row for row in rows}
    for name in bench.sheet.left():
        missing = by_name[name].missing(bench.job.place.on_gpu)
        figures = {"name": name, "left_out": missing} if missing else bench.run(by_name[name])
        bench.found["plain"] = bench.plain()
        bench.sheet.put(figures)
        print(f"{name}: {_said(figures)}", flush=True)
    return bench.found


def _said(figures: Found) -> str:
    if "step_ms" in figures:
        return f"{figures['step_ms']:.1f} ms, {figures['ratio']:.2f} times plain"
    return str(figures.get("left_out") or figures["failed"])


def main() -> int:
    parser = gpu_place.parser_of(__doc__)
    parser.add_argument("--plot", type=Path, help="draw memory against time here, and <name>-timeline beside it")
    parser.add_argument("--lora", action="store_true", help="all layers, frozen but for adapters")
    options = parser.parse_args()
    place = gpu_place.place_of(options)
    deterministic()
    sizes = Sizes.at(place, lora=options.lora)
    skipped = place.sized((), SKIPPED_IN_DRY_RUN)
    rows = tuple(row for row in (LORA_ROWS if options.lora else ROWS) if row.name not in skipped)
    return run(Job(place, sizes), rows, options.json, options.plot, timeline=not options.lora)


def run(job: Job, rows: tuple[Row, ...], path: Path, plot: Path | None, *, timeline: bool) -> int:
    """Measure the rows, draw them, and return the exit code of the part."""
    bench = Bench(job, Sheet(path, [row.name for row in rows]))
    found = run_all(bench, rows)
    if plot is not None:
        try:
            from benchmarks.gpu import llama_plot as gpu_llama_plot

            gpu_llama_plot.scatter(found, plot)
            if timeline:
                gpu_llama_plot.step(job, plot.with_stem(f"{plot.stem}-timeline"))
        except ImportError as error:
            found["picture"] = f"no picture: {error}"
            bench.sheet.save()
    return gpu_place.reported(gpu_place.wrong(found["rows"], "plain"))


if __name__ == "__main__":
    sys.exit(main())
