"""Loss curves of 500 steps under lossy policies, and of plain ones: ``python -m benchmarks.gpu.curves --json FILE``.

A GPT in bfloat16 autocast, each row in a process of its own, with plain training beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from actstore.bench import runner
from actstore.bench.peers.rows import PLAIN
from actstore.bench.peers.rows import ROWS as ALL
from actstore.bench.workloads import sized
from actstore.bench.workloads.workload import Workload
from benchmarks.gpu import place as gpu_place
from benchmarks.gpu.place import Place, Sheet

NAMES = ("keep", "int8", "derive(int8)", "recompute(int8)")

Found = dict[str, Any]


def job(place: Place) -> Workload:
    full = {"layers": 6, "width": 512, "heads": 8, "context": 256, "batch": 16, "steps": 500}
    small = {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 2, "steps": 8}
    return sized("gpt", **place.sized(full, small), warmup=0, dtype="bfloat16", device=place.device)


def run_all(place: Place, path: Path) -> Found:
    """Train each row that has no figures of this commit, and save after each."""
    sheet, work, by_name = Sheet(path, place.sized(NAMES, NAMES[:2])), job(place), {row.name: row for row in ALL}
    sheet.found["dry_run"] = not place.on_gpu
    for name in sheet.left():
        result = runner.run(work, [PLAIN, by_name[name]])
        failed = [{"failed": row.failed} for row in result.failed[:1]]
        sheet.put({"name": name, "run": result.to_dict(), **(failed[0] if failed else {})})
        print(f"{name}: {work.steps} steps{', failed' if failed else ''}", flush=True)
    return sheet.found


def together(found: Found) -> Found:
    """Return the runs of all rows as one, as `benchmarks.suite.convergence` reads it, with plain training once."""
    runs = [row["run"] for row in found["rows"] if len(row["run"]["rows"]) == 2]
    plain = [run["rows"][0] for run in runs[:1]]
    return {"runs": [runs[0] | {"rows": [*plain, *(run["rows"][1] for run in runs)]}] if runs else []}


def main() -> int:
    parser = gpu_place.parser_of(__doc__)
    parser.add_argument("--plot", type=Path, help="draw the losses into this file")
    options = parser.parse_args()
    found = run_all(gpu_place.place_of(options), options.json)
    if options.plot is not None:
        from benchmarks.suite import convergence

        convergence.draw(together(found)).savefig(options.plot)
    return gpu_place.reported(gpu_place.wrong(found["rows"], "plain"))


if __name__ == "__main__":
    sys.exit(main())
