"""Profile of the time of a saved tensor: ``python -m benchmarks.hotpath.profiled``, which needs py-spy.

py-spy samples this process from outside while it packs and unpacks int8 tensors of 4 KB. So calls cost the same with
and without it, unlike under a profiler inside the process. Samples count for the innermost Python function; C code
counts for its caller.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from time import monotonic

import torch

from actstore import ActivationStore
from benchmarks.hotpath.run import Clock, time_direct
from benchmarks.markdown import table

SAMPLES_PER_S = 500  # samples a second


def work(policy: str, seconds: float) -> float:
    """Pack and unpack for `seconds`; return microseconds for one tensor."""
    torch.set_num_threads(1)
    x = torch.randn(32, 32, requires_grad=True)
    tensors = [(x + i).sin() for i in range(100)]
    store = ActivationStore(policy=policy, min_bytes=0)
    times = []
    end = monotonic() + seconds
    while monotonic() < end:
        times.append(time_direct(tensors, lambda: store, Clock("cpu")))
    return min(times)


def fold(samples: str) -> list[tuple[str, int]]:
    """Count samples by innermost function, over stacks that work on a tensor; most first."""
    found: Counter[str] = Counter()
    for line in samples.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if (
            any(frame.startswith("time_direct") for frame in frames)
            and "importlib" not in stack
            and "numba" not in stack
        ):
            found[re.sub(r":\d+\)$", ")", frames[-1])] += int(count)
    return found.most_common()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="int8")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--work", action="store_true", help="only do the work and print its microseconds")
    options = parser.parse_args()
    if options.work:
        print(work(options.policy, options.seconds))
        return 0
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        print("py-spy is not installed; pip install py-spy", file=sys.stderr)
        return 2
    command = [
        sys.executable,
        "-m",
        "benchmarks.hotpath.profiled",
        "--work",
        "--policy",
        options.policy,
        "--seconds",
        str(options.seconds),
    ]
    alone_us = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        spying = [spy, "record", "--rate", str(SAMPLES_PER_S), "--format", "raw", "--output", file.name, "--", *command]
        subprocess.run(spying, capture_output=True, check=True)
        found = fold(Path(file.name).read_text())
    total = sum(count for _, count in found)
    rows = [[f"`{name}`", f"{count / total:.1%}", f"{alone_us * count / total:.2f}"] for name, count in found]
    print(f"{options.policy}: {alone_us:.1f} us to pack and unpack a tensor of 4 KB; {total} samples\n")
    print("\n".join(table(["function", "share", "us"], rows[: options.rows])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
