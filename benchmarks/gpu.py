"""All that needs a GPU, in one run of at most nine minutes: ``make gpu``.

Each part is a process of its own with a time limit; what is there when the time ends is kept. The figures go to
``results/<gpu>.json`` and ``results/<gpu>.md`` beside this file after each part. A part that was run before and not
now keeps its older figures, with their time and versions. Nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from actstore.bench.environment import environment
from benchmarks.gpu_page import page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
WORK = ROOT / "build" / "gpu"
TOTAL_S = 525.0  # of nine minutes; the rest is for starting and writing
KILL_S = 5.0

# On the machine with the GPU pytest may lack the plugin behind an option of pyproject.toml.
_PYTEST = (
    "-m",
    "pytest",
    "-q",
    "-rfE",
    "--continue-on-collection-errors",
    "-o",
    "addopts=",
    "-W",
    "default",  # the packages there are other versions than the pinned ones: their warnings are no failures
    "-W",
    "ignore::pytest.PytestConfigWarning",
)
_CODECS = "tests/codecs/test_cuda.py"
_TRANSFER = ("benchmarks/gpu_transfer.py",)
# What is kept beside the figures: the file in the work folder, and the ending of its name among the results.
_KEPT = {
    "main.png": ".png",
    "transfer.png": "-transfer.png",
    "transfer.ndjson": "-transfer.ndjson",
    "transfer.chrome.json": "-transfer.chrome.json",
}


@dataclass(frozen=True)
class Part:
    """One command, run by this Python in the root of the repository.

    Attributes
    ----------
    command : arguments; ``{json}``, ``{plot}`` and ``{trace}`` become files in the work folder
    limit_s : after this long it is stopped
    """

    name: str
    command: tuple[str, ...]
    limit_s: float


PARTS = (
    Part("ceilings", ("benchmarks/gpu_device.py", "ceilings", "--json", "{json}"), 60),
    Part("transfer", (*_TRANSFER, "--json", "{json}", "--trace", "{trace}", "--plot", "{plot}"), 120),
    Part("kernels", ("benchmarks/gpu_device.py", "kernels", "--json", "{json}"), 150),
    Part("tests", (*_PYTEST, "tests", "-m", "gpu", f"--ignore={_CODECS}"), 150),
    Part("codecs", (*_PYTEST, _CODECS), 150),
    Part("main", ("benchmarks/gpu_train.py", "main", "--json", "{json}", "--plot", "{plot}"), 210),
    Part("exact", ("benchmarks/gpu_train.py", "exact", "--json", "{json}"), 150),
    Part("hotpath", ("benchmarks/hotpath.py", "--device", "cuda", "--json", "{json}"), 60),
    Part("sanitizer", ("benchmarks/gpu_sanitizer.py",), 150),
)


def run_part(part: Part, limit_s: float, work: Path) -> dict[str, Any]:
    """Run a part for at most `limit_s` seconds.

    Returns
    -------
    dict : ``status`` (ok, failed or stopped), ``seconds``, ``said`` (its last line), and ``figures``, what it wrote as
        JSON, complete or not; None where it wrote none. Its whole output is in ``<part>.log`` in the work folder.
    """
    work.mkdir(parents=True, exist_ok=True)
    files = {kind: work / f"{part.name}.{kind}" for kind in ("json", "log", "png", "ndjson", "chrome.json")}
    for file in files.values():
        file.unlink(missing_ok=True)
    named = {"json": files["json"], "plot": files["png"], "trace": files["ndjson"]}
    command = [sys.executable, *(argument.format_map(named) for argument in part.command)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100"}
    start = monotonic()
    with files["log"].open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)
        status = _wait(process, limit_s)
    said = [line.strip() for line in files["log"].read_text(errors="replace").splitlines() if line.strip()]
    return {
        "status": status,
        "seconds": round(monotonic() - start, 1),
        "said": said[-1] if said else "",
        "figures": _read(files["json"]),
    }


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    try:
        return "ok" if process.wait(timeout=limit_s) == 0 else "failed"
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(timeout=KILL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return "stopped"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # not written, or stopped while writing
        return None


def slug(gpu: str) -> str:
    """A file name for a GPU: ``NVIDIA H200`` becomes ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def write(found: dict[str, Any], name: str, out: Path | None) -> None:
    """Write the figures and their page to the results folder, and to `out` with the logs and pictures."""
    for folder in [RESULTS, *([out] if out else [])]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
        (folder / f"{name}.md").write_text(page(found))
        for kept, ending in _KEPT.items():
            if (WORK / kept).exists():
                shutil.copy(WORK / kept, folder / f"{name}{ending}")
    if out is not None:
        for log in WORK.glob("*.log"):
            shutil.copy(log, out)


def run_all(parts: list[Part], out: Path | None, total_s: float = TOTAL_S) -> int:
    """Run the parts in order, writing after each; the exit code."""
    end = monotonic() + total_s
    env = environment()
    name = slug(env["gpu"])
    found: dict[str, Any] = _read(RESULTS / f"{name}.json") or {"parts": {}}
    found["gpu"] = env["gpu"]
    good = True
    for part in parts:
        limit_s = min(part.limit_s, end - monotonic())
        if limit_s < 1:
            print(f"{part.name:<10} not run: the time is over")
            good = False
            continue
        print(f"{part.name:<10} ", end="", flush=True)
        result = run_part(part, limit_s, WORK)
        good &= result["status"] == "ok"
        print(f"{result['status']}, {result['seconds']:.0f} s. {result['said']}", flush=True)
        found["parts"][part.name] = {"environment": env, **result}
        write(found, name, out)
    print(f"figures: benchmarks/results/{name}.md; output of each part: build/gpu/<part>.log")
    return 0 if good else 1


def main() -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=names, help="run only this part; may be repeated")
    parser.add_argument("--out", type=Path, help="write the results, logs and pictures to this folder too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: make gpu measures on a GPU and writes nothing without one", file=sys.stderr)
        return 2
    return run_all([part for part in PARTS if not options.part or part.name in options.part], options.out)


if __name__ == "__main__":
    sys.exit(main())
