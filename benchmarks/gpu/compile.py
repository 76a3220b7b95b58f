"""Compilation of the CUDA sources, all at once, into CuPy's cache: ``python -m benchmarks.gpu.compile``.

Without it each process of each part compiles the sources that it meets, the same ones at the same time.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from time import monotonic

from actstore.base import source
from actstore.kernels.cuda import launch


def names() -> list[str]:
    """Return the names of all CUDA sources."""
    return sorted(path.stem for path in source.folder().glob("*.cu"))


def main(chosen: list[str]) -> int:
    """Compile the chosen sources here; without any, each source in a process of its own."""
    if find_spec("cupy") is None:
        print("nothing is compiled: cupy is not installed")
        return 0
    if chosen:
        for name in chosen:
            launch._module(name).compile()
        return 0
    begin = monotonic()
    running = {name: subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.compile", name]) for name in names()}
    failed = [name for name, process in running.items() if process.wait()]
    print(f"{len(running)} sources compiled in {monotonic() - begin:.0f} s; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
