"""Exactness of the lossless rows of ``actstore bench`` on a GPU: ``python -m benchmarks.gpu.exact --json FILE``.

A GPT in float32, each row in a process of its own: gradients of the first batch, and the loss after all steps, must be
those of plain training, bit for bit.
"""

from __future__ import annotations

import sys

from actstore.bench.peers.rows import ROWS, Row
from actstore.bench.result import Result
from actstore.bench.runner import run
from actstore.bench.workloads.workload import Workload
from benchmarks.gpu import place as gpu_place
from benchmarks.gpu.place import Place

LOSSLESS = (
    "plain",
    "recompute",
    "derive",
    "raw @ host",
    "raw @ disk",
    "expack",
    "recompute(raw @ disk)",
)
DRY_ROWS = ("plain", "recompute")  # of a dry run


def job(place: Place) -> tuple[Workload, list[Row]]:
    """Return the workload and its rows, plain first."""
    full = Workload(layers=6, width=512, heads=8, context=512, batch=8, steps=4, warmup=1, device=place.device)
    small = Workload(layers=2, width=32, heads=2, context=32, batch=2, steps=2, warmup=1, device=place.device)
    names = place.sized(LOSSLESS, DRY_ROWS)
    return place.sized(full, small), [row for row in ROWS if row.name in names]


def inexact(result: Result) -> list[str]:
    """Return the rows whose gradients or loss differ from plain's."""
    plain = result.rows[0]
    return [
        row.name for row in result.rows if not row.failed and not (row.bit_equal and row.loss_hex == plain.loss_hex)
    ]


def main() -> int:
    options = gpu_place.parser_of(__doc__).parse_args()
    work, rows = job(gpu_place.place_of(options))
    result = run(work, rows, row_done=lambda so_far: so_far.write(options.json))
    result.write(options.json)
    broken = inexact(result)
    for row in result.failed:
        print(f"{row.name} failed: {row.failed}")
    for name in broken:
        print(f"{name} is lossless and does not have plain's gradients and loss, bit for bit")
    exact = len(result.rows) - len(broken) - len(result.failed)
    print(f"{exact} of {len(rows)} rows are exact")
    return 1 if result.failed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
