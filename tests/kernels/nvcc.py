"""Compiles the CUDA sources for every architecture that we name, and reads registers and spills from what ptxas says.

``python -m tests.kernels.nvcc`` writes csrc/registers.md, with a digest of each source that it has compiled.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from actstore.base import source

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "nvcc"
PAGE = ROOT / "csrc" / "registers.md"
ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")
AT_ONCE = 2  # architectures
FLAGS = (
    *("-std=c++17", "--ftz=true"),  # as CuPy has them
    *("-Werror", "all-warnings", "-diag-suppress", "177"),  # a header, written out, may hold more than a source uses
    *("-Xptxas", "-v"),
)
HEAD = """\
# Registers of the kernels

Registers per thread by nvcc {version} with `{flags}`; no kernel spills. A multiprocessor has 65,536: 4 blocks
of 256 threads at 64 a thread, 3 at 80, 2 at 128. `python -m tests.kernels.nvcc` writes this page."""

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)\w*'")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")

Figures = dict[str, dict[str, dict[str, int]]]
"""By kernel, then architecture: registers, stack (bytes a thread) and spill (bytes stored and loaded)."""


def sources() -> list[str]:
    """The names of all CUDA sources."""
    return sorted(path.stem for path in source.folder().glob("*.cu"))


def compiler() -> str | None:
    """nvcc: that of the pip package nvidia-cuda-nvcc if it is installed, else the one on PATH."""
    found = find_spec("nvidia")
    folders = [Path(folder) for folder in found.submodule_search_locations or ()] if found else []
    installed = sorted(nvcc for folder in folders for nvcc in folder.glob("cu*/bin/nvcc"))
    return str(installed[-1]) if installed else shutil.which("nvcc")


@cache
def version(nvcc: str) -> str:
    """The version that a compiler says of itself, such as 13.5.37."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V([\d.]+)", said)[1]  # type: ignore[index]


def digest(name: str) -> str:
    """SHA-256 of a source with its headers, and of the flags."""
    return sha256("\n".join([source.read(f"{name}.cu").text, *FLAGS]).encode()).hexdigest()


def compile_source(name: str, nvcc: str, architectures: Sequence[str] = ARCHITECTURES) -> Figures:
    """Compile one source for some architectures; what is known from an earlier run is read from build/nvcc.

    Raises
    ------
    AssertionError : it does not compile without a warning
    """
    text = source.read(f"{name}.cu").text
    key = sha256("\n".join([digest(name), version(nvcc), *architectures]).encode()).hexdigest()
    known = BUILD / f"{name}-{len(architectures)}-{key[:16]}.json"
    if known.exists():
        return json.loads(known.read_text())  # type: ignore[no-any-return]
    BUILD.mkdir(parents=True, exist_ok=True)
    figures: Figures = {}
    with tempfile.TemporaryDirectory(dir=BUILD) as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        unit = Path(folder) / f"{name}.cu"
        unit.write_text(text)
        for log in pool.map(lambda arch: _compile(nvcc, unit, arch), architectures):
            for kernel, of in read(log).items():
                figures.setdefault(kernel, {}).update(of)
    for old in BUILD.glob(f"{name}-{len(architectures)}-*.json"):
        old.unlink()
    known.write_text(json.dumps(figures))
    return figures


def _compile(nvcc: str, unit: Path, arch: str) -> str:
    """What the compiler says, for one architecture."""
    command = [nvcc, *FLAGS, f"-arch=sm_{arch}", "-cubin", "-o", str(unit.with_suffix(f".{arch}")), str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def read(log: str) -> Figures:
    """The figures of every kernel in what ``ptxas -v`` says."""
    figures: Figures = {}
    kernel: dict[str, int] = {}
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernel = figures.setdefault(entry[1], {}).setdefault(entry[2], {})
        elif memory := _MEMORY.search(line):
            kernel.setdefault("stack", int(memory[1]))
            kernel.setdefault("spill", int(memory[2]) + int(memory[3]))
        elif registers := _REGISTERS.search(line):
            kernel.setdefault("registers", int(registers[1]))
    return figures


def spills(figures: Figures) -> list[str]:
    """The kernels that keep values in memory, with their architectures."""
    found = ((kernel, arch, of) for kernel, by_arch in figures.items() for arch, of in by_arch.items())
    return [f"{kernel} for sm_{arch}: {of}" for kernel, arch, of in found if of["spill"] or of["stack"]]


def table(figures: Figures) -> list[str]:
    """Registers per thread as lines of Markdown, a row for each kernel."""
    header = ["kernel", *(f"sm_{arch}" for arch in ARCHITECTURES)]
    rows = [[kernel, *(str(of[arch]["registers"]) for arch in ARCHITECTURES)] for kernel, of in sorted(figures.items())]
    rule = ["---", *(["---:"] * len(ARCHITECTURES))]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def page(all_figures: dict[str, Figures], nvcc_version: str) -> str:
    """csrc/registers.md."""
    lines = [HEAD.format(version=nvcc_version, flags=" ".join(FLAGS[:2]))]
    for name, figures in all_figures.items():
        lines += ["", f"## {name}.cu", "", f"SHA-256 with its headers and flags: {digest(name)}", "", *table(figures)]
    return "\n".join(lines) + "\n"


def main() -> None:
    nvcc = compiler()
    if nvcc is None:
        raise SystemExit("no nvcc: pip install -r requirements-dev.txt")
    all_figures = {name: compile_source(name, nvcc) for name in sources()}
    if spilled := [name for name, figures in all_figures.items() if spills(figures)]:
        raise SystemExit(f"kernels of these sources spill: {', '.join(spilled)}")
    PAGE.write_text(page(all_figures, version(nvcc)))


if __name__ == "__main__":
    main()
