"""Blocks of an 8B-class Llama, compiled as a whole, with a policy in the graphs: ``python -m benchmarks.gpu.graphs``.

The blocks of `benchmarks.gpu.llama`, two of them, compiled by Inductor: plain, under policies, and within PyTorch's
`activation_memory_budget`, whose peak is then the budget of a plan of ours. Each step has a plain step right before or
after it, in turn; figures are medians, written after each row. ``--duel`` compiles eight blocks with CUDA graphs, under
two of PyTorch's budgets and plans at their peaks.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from actstore import ActivationStore, Auto
from actstore.bench.trainer import relative_error
from benchmarks.gpu import place as gpu_place
from benchmarks.gpu.llama_model import Job, Sizes, deterministic
from benchmarks.gpu.place import Place, Sheet, medians
from benchmarks.planner.rival import rival

LAYERS, DUEL_LAYERS = 2, 8  # the compiler's time grows with them
DUEL_MODE = "reduce-overhead"  # Inductor's, with CUDA graphs
WARMUP, REPEATS = 2, 5  # steps; the first compiles
GIB = 2**30  # budget of a dry run, which has no peak

Found = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One way to compile.

    Attributes
    ----------
    policy : of ActivationStore; empty for none
    share : PyTorch's budget, as a share of the bytes that backward may get from forward; 0 for none
    rival : the row whose peak is the budget of a plan; empty for none
    exact : whether its gradients must be those of plain compilation, bit for bit
    """

    name: str
    policy: str = ""
    share: float = 0.0
    rival: str = ""
    exact: bool = False


def duel(share: float) -> tuple[Row, Row]:
    """Return PyTorch's budget, and a plan at its peak."""
    theirs = Row(f"PyTorch's budget {share}", share=share)
    return theirs, Row(f"plan at its peak, {share}", "auto", rival=theirs.name)


PLAIN = Row("plain", exact=True)
DUEL_ROWS = (*duel(0.5), *duel(0.25))
ROWS = (
    Row("keep", "keep", exact=True),
    Row("int8", "int8"),
    Row("recompute", "blocks.* : recompute; * : keep"),
    Row("recompute but attention", "*/@sdpa : keep; blocks.* : recompute; * : keep"),
    *duel(0.5),
)


class Compiled:
    """A compiled job that has trained some steps."""

    def __init__(self, place: Place, sizes: Sizes, row: Row, budget: int, mode: str) -> None:
        self._place, self._job, self._mode = place, Job(place, sizes), mode
        backend = "inductor" if mode else place.sized("inductor", "aot_eager")
        options = {"backend": backend, **({"mode": mode} if mode else {})}
        self._store = None
        if row.policy:
            policy = Auto(budget or GIB) if row.rival else row.policy
            self._store = ActivationStore(self._job.model, policy, min_bytes=place.sized(1024, 0))
            self._store.compile(**options)
        else:
            if row.share:
                options = {"backend": rival(row.share, backend, mode)}
            self._job.model.compile(**options)
        for _ in range(WARMUP):
            self.step()

    def step(self) -> Found:
        """Train; return milliseconds, bytes that are held after forward, and the peaks of backward and of the step.

        Bytes are above those before forward, gradients included.
        """
        place, job = self._place, self._job
        if self._mode:
            torch.compiler.cudagraph_mark_step_begin()
        job.model.zero_grad(set_to_none=True)
        before = place.allocated()
        figures: Found = {}

        def run() -> None:
            place.reset_peak()
            with self._store or nullcontext():
                loss = job.forward()
            figures["held_bytes"], peak = place.allocated() - before, place.peak()
            place.reset_peak()
            job.backward(loss)
            figures["backward_peak_bytes"] = place.peak() - before
            figures["peak_bytes"] = max(peak, place.peak()) - before

        return {"step_ms": place.elapsed_ms(run), **figures}

    def gradients(self) -> list[torch.Tensor]:
        """Return copies of a step's gradients: CUDA graphs write the next step's into the same memory."""
        self.step()
        return [grad.clone() for grad in self._job.gradients()]


def run_all(place: Place, path: Path, rows: tuple[Row, ...], layers: int, mode: str) -> Found:
    """Compile and train each row that has no figures of this commit, and save after each."""
    sizes, by_name = Sizes.at(place, layers=layers), {row.name: row for row in rows}
    sheet = Sheet(path, by_name)
    found, left = sheet.found, sheet.left()
    if not left:
        return found
    plain = Compiled(place, sizes, PLAIN, 0, mode)
    found |= {"dry_run": not place.on_gpu, "sizes": asdict(sizes), "mode": mode}
    found["plain"] = {"name": PLAIN.name, **medians([plain.step() for _ in range(REPEATS)])}
    expected = plain.gradients()
    for row in map(by_name.__getitem__, left):
        figures: Found = {"name": row.name, "exact": row.exact}
        rivals = [other["peak_bytes"] for other in found["rows"] if other["name"] == row.rival and "ratio" in other]
        try:
            mine = Compiled(place, sizes, row, rivals[0] if rivals else 0, mode)
            samples, ratios = [], []
            for repeat in range(place.sized(REPEATS, 2)):
                pair = {who: who.step() for who in (plain, mine)[:: 1 if repeat % 2 else -1]}
                samples.append(pair[mine])
                ratios.append(pair[mine]["step_ms"] / pair[plain]["step_ms"])
            gradients = mine.gradients()
            equal = all(map(torch.equal, gradients, expected))
            error = relative_error(gradients, expected)
            figures |= {**medians(samples), "ratio": median(ratios), "equal": equal, "grad_error": error}
            said = f"{figures['ratio']:.2f} times plain"
            del mine, gradients
        except Exception as error:  # the remaining rows run
            figures["failed"] = said = f"{type(error).__name__}: {error}".splitlines()[0]
        place.empty_cache()
        sheet.put(figures)
        print(f"{row.name}: {said}", flush=True)
    return found


def main() -> int:
    parser = gpu_place.parser_of(__doc__)
    parser.add_argument("--duel", action="store_true", help="eight blocks, PyTorch's budgets against plans")
    parser.add_argument("--mode", default="", help="of Inductor, also on a CPU")
    options = parser.parse_args()
    place = gpu_place.place_of(options)
    deterministic()
    warnings.simplefilter("ignore")  # of the compiler about itself
    rows, layers = (DUEL_ROWS, DUEL_LAYERS) if options.duel else (ROWS, LAYERS)
    mode = options.mode or (place.sized(DUEL_MODE, "") if options.duel else "")
    found = run_all(place, options.json, rows, place.sized(layers, LAYERS), mode)
    return gpu_place.reported(gpu_place.wrong(found["rows"], "plain compilation's"))


if __name__ == "__main__":
    sys.exit(main())
