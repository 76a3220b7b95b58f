"""Blocks of an 8B-class Llama, compiled as a whole, with a policy in the graphs: ``python -m benchmarks.gpu.graphs``.

The blocks of `benchmarks.gpu.llama`, two of them, compiled by Inductor: plain, under policies, and within PyTorch's
`activation_memory_budget`, whose peak is then the budget of a plan of ours. Each step has a plain step right before or
after it, in turn; figures are medians, written after each row.
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

LAYERS = 2  # the compiler's time grows with them
WARMUP, REPEATS = 2, 5  # steps; the first compiles
RIVAL_SHARE = 0.5
GIB = 2**30  # budget of a dry run, which has no peak

Found = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One way to compile.

    Attributes
    ----------
    policy : of ActivationStore; empty for none
    share : PyTorch's budget, as a share of the bytes that backward may get from forward; 0 for none
    exact : whether its gradients must be those of plain compilation, bit for bit
    """

    name: str
    policy: str = ""
    share: float = 0.0
    exact: bool = False


PLAIN = Row("plain", exact=True)
THEIRS = Row(f"PyTorch's budget {RIVAL_SHARE}", share=RIVAL_SHARE)
OURS = Row(f"plan at its peak, {RIVAL_SHARE}", "auto")
ROWS = (
    Row("keep", "keep", exact=True),
    Row("int8", "int8"),
    Row("recompute", "blocks.* : recompute; * : keep"),
    Row("recompute but attention", "*/@sdpa : keep; blocks.* : recompute; * : keep"),
    THEIRS,
    OURS,
)


class Compiled:
    """A compiled job that has trained some steps."""

    def __init__(self, place: Place, sizes: Sizes, row: Row, budget: int) -> None:
        self._place, self._job = place, Job(place, sizes)
        backend = place.sized("inductor", "aot_eager")
        self._store = None
        if row.policy:
            policy = Auto(budget or GIB) if row is OURS else row.policy
            self._store = ActivationStore(self._job.model, policy, min_bytes=place.sized(1024, 0))
            self._store.compile(backend=backend)
        else:
            self._job.model.compile(backend=rival(row.share, backend) if row.share else backend)
        for _ in range(WARMUP):
            self.step()

    def step(self) -> Found:
        """Train; return milliseconds, bytes that are held after forward, and the peaks of backward and of the step.

        Bytes are above those before forward, gradients included.
        """
        place, job = self._place, self._job
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
        return self._job.gradients()


def run_all(place: Place, path: Path) -> Found:
    """Compile and train each row that has no figures of this commit, and save after each."""
    sizes, by_name = Sizes.at(place, layers=LAYERS), {row.name: row for row in ROWS}
    sheet = Sheet(path, by_name)
    found, left = sheet.found, sheet.left()
    if not left:
        return found
    plain = Compiled(place, sizes, PLAIN, 0)
    found |= {"dry_run": not place.on_gpu, "sizes": asdict(sizes)}
    found["plain"] = {"name": PLAIN.name, **medians([plain.step() for _ in range(REPEATS)])}
    expected = [grad.clone() for grad in plain.gradients()]
    for row in map(by_name.__getitem__, left):
        figures: Found = {"name": row.name, "exact": row.exact}
        rivals = [other["peak_bytes"] for other in found["rows"] if other["name"] == THEIRS.name and "ratio" in other]
        try:
            mine = Compiled(place, sizes, row, rivals[0] if rivals else 0)
            samples, ratios = [], []
            for repeat in range(place.sized(REPEATS, 2)):
                pair = {who: who.step() for who in (plain, mine)[:: 1 if repeat % 2 else -1]}
                samples.append(pair[mine])
                ratios.append(pair[mine]["step_ms"] / pair[plain]["step_ms"])
            equal = all(map(torch.equal, mine.gradients(), expected))
            error = relative_error(mine.gradients(), expected)
            figures |= {**medians(samples), "ratio": median(ratios), "equal": equal, "grad_error": error}
            said = f"{figures['ratio']:.2f} times plain"
            del mine
        except Exception as error:  # the remaining rows run
            figures["failed"] = said = f"{type(error).__name__}: {error}".splitlines()[0]
        place.empty_cache()
        sheet.put(figures)
        print(f"{row.name}: {said}", flush=True)
    return found


def main() -> int:
    options = gpu_place.parser_of(__doc__).parse_args()
    place = gpu_place.place_of(options)
    deterministic()
    warnings.simplefilter("ignore")  # of the compiler about itself
    found = run_all(place, options.json)
    return gpu_place.reported(gpu_place.wrong(found["rows"], "plain compilation's"))


if __name__ == "__main__":
    sys.exit(main())
