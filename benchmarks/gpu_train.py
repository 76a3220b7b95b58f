"""The main job on a GPU, without the packages of the command line: ``python benchmarks/gpu_train.py main|exact``.

main    a GPT whose activations take gigabytes, bfloat16 by autocast
exact   a smaller one in float32: every lossless row must have plain's gradients and loss bit for bit
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from actstore.bench.result import Result
from actstore.bench.rows import ROWS, Row
from actstore.bench.runner import run
from actstore.bench.workload import Workload

_MAIN = Workload(6, 2048, 16, 1024, 8, steps=6, warmup=2, dtype="bfloat16", device="cuda")
_EXACT = Workload(6, 512, 8, 512, 8, steps=4, warmup=1, device="cuda")
_SLOW = {"raw @ disk"}  # gigabytes a step: left to the smaller job


def job(name: str) -> tuple[Workload, list[Row]]:
    """The workload and the rows called `name`."""
    if name == "main":
        return _MAIN, [row for row in ROWS if row.name not in _SLOW]
    return _EXACT, list(ROWS)


def inexact(result: Result) -> list[str]:
    """Rows that promise the numbers of plain and do not have them. Meant for the float32 job."""
    plain = result.rows[0]
    promised = [row for row in result.rows if not row.failed and "int8" not in row.policy and "8-bit" not in row.name]
    return [row.name for row in promised if not row.bit_equal or row.loss_hex != plain.loss_hex]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("main", "exact"))
    parser.add_argument("--json", type=Path, required=True, help="write the result to this file, row by row")
    parser.add_argument("--plot", type=Path, help="draw memory against time into this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        return 2
    work, rows = job(options.what)
    result = run(work, rows, row_done=lambda so_far: so_far.write(options.json))
    result.write(options.json)
    if options.plot is not None:
        from actstore.bench.plot import save

        save(result, options.plot)
    for row in result.failed:
        print(f"{row.name} failed: {row.failed}", file=sys.stderr)
    broken = inexact(result) if options.what == "exact" else []
    for name in broken:
        print(f"{name} is lossless and does not have plain's gradients and loss bit for bit", file=sys.stderr)
    return 1 if result.failed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
