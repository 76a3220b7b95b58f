"""Exactness of the lossless rows of ``actstore bench`` on a GPU: ``python -m benchmarks.gpu.exact --json FILE``.

A GPT in float32, each row in a process of its own: gradients of the first batch, and the loss after all steps, must be
those of plain training, bit for bit. ``--times`` has other rows, whose times count: the host is the limit there. Rows
that this commit has measured do not run again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from actstore.bench.peers.rows import PLAIN, ROWS, Row
from actstore.bench.result import Result
from actstore.bench.runner import run
from actstore.bench.workloads.workload import Workload
from benchmarks.gpu import place as gpu_place
from benchmarks.gpu.place import Place, Sheet

LOSSLESS = (
    "plain",
    "recompute",
    "derive",
    "raw @ host",
    "raw @ disk",
    "expack",
    "recompute(raw @ disk)",
)
TIMED = (
    "plain", "torch checkpoint", "recompute", "derive", "expack", "raw @ host", "save_on_cpu", "int8", "derive(int8)",
    "compile", "int8 in the graph",
)  # fmt: skip
DRY_ROWS = ("plain", "recompute", "torch checkpoint")  # of a dry run
TIMED_STEPS = 24


def job(place: Place, *, times: bool = False) -> tuple[Workload, list[Row]]:
    """Return the workload and its rows, plain first."""
    steps, warmup = (TIMED_STEPS, 4) if times else (4, 1)
    full = Workload(layers=6, width=512, heads=8, context=512, batch=8, steps=steps, warmup=warmup, device=place.device)
    small = Workload(layers=2, width=32, heads=2, context=32, batch=2, steps=2, warmup=1, device=place.device)
    chosen = TIMED if times else LOSSLESS
    names = place.sized(chosen, tuple(name for name in DRY_ROWS if name in chosen))
    return place.sized(full, small), [row for row in ROWS if row.name in names]


def inexact(result: Result) -> list[str]:
    """Return the rows whose gradients or loss differ from plain's."""
    plain = result.rows[0]
    return [
        row.name for row in result.rows if not row.failed and not (row.bit_equal and row.loss_hex == plain.loss_hex)
    ]


def run_all(work: Workload, rows: list[Row], path: Path) -> Result:
    """Train each row that has no figures of this commit, beside plain training, and save after each."""
    sheet = Sheet(path, [row.name for row in rows])
    left = [row for row in rows if row.name in sheet.left() and row != PLAIN]

    def save(so_far: Result) -> None:
        figures = so_far.to_dict()
        sheet.found |= {name: value for name, value in figures.items() if name != "rows"}
        for row in figures["rows"]:
            if row["loss_hex"] is not None or row["failed"]:  # otherwise it runs still
                sheet.put(row)

    if left:
        save(run(work, [PLAIN, *left], row_done=save))
    return Result.from_dict(sheet.found)


def main() -> int:
    parser = gpu_place.parser_of(__doc__)
    parser.add_argument("--times", action="store_true", help="rows whose times count")
    options = parser.parse_args()
    work, rows = job(gpu_place.place_of(options), times=options.times)
    result = run_all(work, rows, options.json)
    broken = [] if options.times else inexact(result)
    for row in result.failed:
        print(f"{row.name} failed: {row.failed}")
    for name in broken:
        print(f"{name} is lossless and does not have plain's gradients and loss, bit for bit")
    if options.times:
        print(f"{len(result.rows) - len(result.failed)} of {len(rows)} rows have times")
    else:
        exact = len(result.rows) - len(broken) - len(result.failed)
        print(f"{exact} of {len(rows)} rows are exact")
    return 1 if result.failed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
