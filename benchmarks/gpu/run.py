"""Everything that needs a GPU, in runs of at most nine minutes: ``make gpu``, again until nothing is left.

Each part is a process of its own. The figures go to ``benchmarks/results/<gpu>.json`` and ``<gpu>.md`` beside it after
each part, with pictures; each has the commit that measured it. A run begins with what has no figures of this commit,
and goes on until its time is over (``--minutes``). A part that is stopped goes on next time with its next row or test
file; one without rows keeps its older figures until it ends. Nothing is installed.

``make gpu DEVICE=cpu SCALE=small RESULTS=DIR`` runs every part on the CPU, as a check that all of it works: the same
files, in which no figure is of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from actstore.bench.environment import environment
from benchmarks.gpu.page import page
from benchmarks.gpu.parts import DRY_TOTAL_S, PART_S, PARTS, PICTURES, START_S, Part
from benchmarks.gpu.place import COMMIT, Place, is_of, read

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / "build" / "gpu"
PACKAGES = ROOT / "build" / "gpu-packages"
KILL_S = 5.0
OURS = ("actstore", "benchmarks", "tests")


def run_part(
    part: Part, limit_s: float, work: Path, place: Place, commit: str = "", before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a part for at most `limit_s` seconds.

    Parameters
    ----------
    commit : the commit that is measured
    before : the result of an earlier run of this part; its figures stay where this run brings nothing

    Returns
    -------
    dict : ``status`` (ok, failed, stopped, or left out where a package is missing), ``seconds``, ``said`` (its last
        line), ``commit``, and ``figures``, its JSON, complete or not; None without JSON. Its whole output is in
        ``<part>.log`` in the work folder.
    """
    work.mkdir(parents=True, exist_ok=True)
    for old in [*work.glob(f"{part.name}.*"), *work.glob(f"{part.name}-*")]:
        old.unlink()
    files = {kind: work / f"{part.name}.{ending}" for kind, ending in _FILES.items()}
    earlier = (before or {}).get("figures")
    if part.resumes and earlier:
        files["json"].write_text(json.dumps(earlier))
    named = {f"{{{kind}}}": str(file) for kind, file in files.items()}
    command = [sys.executable, *(named.get(argument, argument) for argument in part.arguments(place))]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), *map(str, packages())]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100", COMMIT: commit}
    environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS adds in one order only with this
    if not place.on_gpu:
        environ["OMP_NUM_THREADS"] = "1"  # parts run side by side, on few cores
    start = monotonic()
    with files["log"].open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)
        status = _wait(process, limit_s)
    lines = files["log"].read_text(errors="replace").splitlines()
    said = next((line.strip() for line in reversed(lines) if re.search(r"\w", line)), "")
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", said) if status == "failed" else None
    if missing and missing[1] not in OURS:
        status, said = "left out", f"{missing[1]} is not installed"
    result = {"status": status, "seconds": round(monotonic() - start, 1), "said": said, "commit": commit}
    if before and earlier and status != "ok" and not part.resumes:
        return before | {"later": result}
    return result | {"figures": read(files["json"])}


_FILES = {"json": "json", "log": "log", "plot": "png", "trace": "ndjson"}


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


def slug(gpu: str) -> str:
    """Return the file name of a GPU: ``NVIDIA H200`` becomes ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def write(found: dict[str, Any], name: str, results: Path, work: Path) -> None:
    """Write the figures, their page and the pictures to the results folder."""
    results.mkdir(parents=True, exist_ok=True)
    for file in PICTURES:
        if (work / file).exists():
            shutil.copy(work / file, results / f"{name}-{file}")
    (results / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
    rewrite(name, results)


def rewrite(name: str, results: Path) -> None:
    """Write the page of a GPU from its figures in the results folder."""
    found = read(results / f"{name}.json")
    pictures = {file: f"{name}-{file}" for file in PICTURES if (results / f"{name}-{file}").exists()}
    (results / f"{name}.md").write_text(page(found, pictures))


def left(parts: Iterable[Part], found: dict[str, Any], commit: str) -> list[Part]:
    """Return the parts without complete figures of this commit; where all have them, those that failed."""
    status = {name: one["status"] for name, one in found.items() if is_of(one, commit) and "later" not in one}
    return [part for part in parts if status.get(part.name, "stopped") == "stopped"] or [
        part for part in parts if status[part.name] == "failed"
    ]


def run_all(parts: Iterable[Part], results: Path, work: Path, place: Place, total_s: float, commit: str = "") -> int:
    """Run the parts in order, neighbors that may side by side; write after each; return the exit code."""
    end = monotonic() + total_s
    env = environment()
    name = slug(env["gpu"]) if place.on_gpu else "dry-run"
    found: dict[str, Any] = read(results / f"{name}.json") or {"parts": {}}
    found |= {"gpu": env["gpu"], "dry_run": not place.on_gpu}
    good, waiting = True, []
    for _, group in groupby(parts, key=lambda part: part.name if part.alone else ""):
        some, left_s = list(group), end - monotonic()
        if left_s < 1:
            waiting += [part.name for part in some]
            continue
        with ThreadPoolExecutor(len(some)) as threads:
            limit_s = min(PART_S, left_s) if place.on_gpu else left_s
            before = {part: found["parts"].get(part.name) for part in some}
            running = {
                threads.submit(run_part, part, limit_s, work, place, commit, before[part]): part for part in some
            }
            for done in as_completed(running):
                part, result = running[done], done.result()
                latest = result.get("later", result)
                good &= latest["status"] in ("ok", "left out")
                print(f"{part.name:<10} {latest['status']}, {latest['seconds']:.0f} s. {latest['said']}", flush=True)
                found["parts"][part.name] = {"environment": env, **result}
                write(found, name, results, work)
                waiting += [part.name] if latest["status"] == "stopped" else []
    if waiting:
        print("left for the next run:", ", ".join(waiting))
    print(f"figures: {os.path.relpath(results / name)}.md; output of each part: {os.path.relpath(work)}/<part>.log")
    return 0 if good and not waiting else 1


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, with a + where files differ from it; empty outside of one."""
    git = ["git", "-C", str(folder)]
    try:
        done = [
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (("rev-parse", "--short=7", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done[0] + "+" * bool(done[1])


def packages() -> list[Path]:
    """Return the folder of ``make gpu-packages``, where it is."""
    return [PACKAGES] if PACKAGES.is_dir() else []


def main() -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=names, help="run only this part; may be repeated")
    parser.add_argument("--minutes", type=float, default=9.0, help="end after this time, 9 by default")
    parser.add_argument("--commit", help="the commit that is measured, where git cannot tell")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    parser.add_argument("--scale", choices=("full", "small"), help="small is that of a dry run")
    parser.add_argument("--page", metavar="GPU", help="write the page of a GPU (nvidia-h200) again, and run nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="write figures, pictures and logs to this folder")
    options = parser.parse_args()
    place, results = Place(options.device, options.scale == "small"), options.results.resolve()
    if options.page:
        rewrite(options.page, results)
        return 0
    if place.on_gpu and not torch.cuda.is_available():
        print("no CUDA device here: make gpu measures on a GPU and writes nothing without one", file=sys.stderr)
        return 2
    if not place.on_gpu and (results == RESULTS or not place.small):
        print("a dry run: make gpu DEVICE=cpu SCALE=small RESULTS=a folder of its own", file=sys.stderr)
        return 2
    work = WORK if results == RESULTS else results / "parts"
    commit = options.commit or commit_of(ROOT)
    total_s = 60 * options.minutes - START_S if place.on_gpu else DRY_TOTAL_S
    chosen = [part for part in PARTS if not options.part or part.name in options.part]
    if place.on_gpu:
        before = read(results / f"{slug(torch.cuda.get_device_name())}.json") or {"parts": {}}
        chosen = chosen if options.part else left(chosen, before["parts"], commit)
        begin = monotonic()
        subprocess.run([sys.executable, "-m", "benchmarks.gpu.compile"], cwd=ROOT, check=False)  # parts say what failed
        total_s -= monotonic() - begin
    return run_all(chosen, results, work, place, total_s, commit)


if __name__ == "__main__":
    sys.exit(main())
