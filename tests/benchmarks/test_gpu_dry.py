"""The dry run of the GPU suite: every part runs on the CPU and leaves the files that a GPU would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import pytests as gpu_tests
from benchmarks.gpu import run as gpu
from benchmarks.gpu.context import LENGTH_TOLERANCE, MAX_ATTEMPTS, Attempt, largest
from benchmarks.gpu.llama_model import Job, Sizes
from benchmarks.gpu.llama_rows import ROWS, entered
from benchmarks.gpu.parts import PARTS, PICTURES
from benchmarks.gpu.place import COMMIT, Place, Sheet

CPU = Place("cpu", small=True)
WITHOUT = """
import runpy, sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name in ("typer", "rich", "matplotlib", "scipy", "hypothesis", "pytest_timeout", "xdist"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    try:
        runpy.run_module(module, run_name="__main__")
    except ModuleNotFoundError as error:
        print(f"{module} lacks {error.name}")
    except SystemExit as end:
        print(f"{module} ends with {end.code}")
"""


# Those that draw pictures; the others start as many tests as they do on a GPU, which are tests of their own here.
@pytest.mark.more
@pytest.mark.timeout(700)  # on a machine that others use too
@pytest.mark.parametrize(
    "names",
    [
        ("llama", "transfer", "context"),
        pytest.param(("vit", "context24", "curves"), marks=pytest.mark.slow),
        pytest.param([part.name for part in PARTS], marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_every_part_runs_on_a_cpu(names: Sequence[str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.run",
        "--device",
        "cpu",
        "--scale",
        "small",
        "--results",
        str(tmp_path),
        *(word for name in names for word in ("--part", name)),
    ]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environ["PYTHONPATH"] = str(gpu.ROOT)
    done = subprocess.run(command, cwd=gpu.ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "parts", "dry-run.json", "dry-run.md", *(f"dry-run-{file}" for file in PICTURES if part_of(file) in names)
    }  # fmt: skip
    found = json.loads((tmp_path / "dry-run.json").read_text())
    assert found["dry_run"] is True
    assert {name: part["status"] for name, part in found["parts"].items()} == dict.fromkeys(names, "ok")
    page = (tmp_path / "dry-run.md").read_text()
    assert page.startswith("**A dry run on a CPU: it shows that everything runs. No figure here is of a GPU.**\n")
    for file in [file for file in PICTURES if part_of(file) in names and file.endswith(".png")]:
        assert f"(dry-run-{file})" in page
        assert (tmp_path / f"dry-run-{file}").read_bytes().startswith(b"\x89PNG")


def part_of(picture: str) -> str:
    """The part that draws a picture: ``llama`` of ``llama-timeline.png``."""
    return re.split("[-.]", picture)[0]


def test_parts_start_without_packages_that_they_do_not_need() -> None:
    modules = sorted({part.command[1] for part in PARTS})
    environ = os.environ | {"PYTHONPATH": str(gpu.ROOT)}
    command = [sys.executable, "-c", WITHOUT, *modules]
    done = subprocess.run(command, cwd=gpu.ROOT, env=environ, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith(("benchmarks.", "tests."))]
    needs = {"benchmarks.hotpath.run": "lacks rich", "tests.autograd.test_random_models": "lacks hypothesis"}
    assert said == [f"{module} {needs.get(module, 'ends with 0')}" for module in modules], done.stderr


def outcomes(folder: Path, commit: str = "", *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the tests of a folder as the suite does; return the process and the outcomes."""
    files = sorted(path.name for path in folder.glob("test_*.py"))
    command = [
        sys.executable,
        "-m",
        gpu_tests.__name__,
        "--json",
        "found.json",
        "--workers",
        "2",
        *options,
        "--",
        *files,
    ]
    environ = os.environ | {"PYTHONPATH": str(gpu.ROOT), COMMIT: commit}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environ, check=False)
    return done, json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("workers", ["1", "2"])
def test_outcomes_of_tests_are_written(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 1 == 2, 'no luck'\n"
        "@pytest.mark.skip(reason='no GPU')\ndef test_skipped(): pass\n"
    )
    done, found = outcomes(tmp_path, "", "--workers", workers)
    assert done.stdout.splitlines()[-1] == "1 passed, 1 failed, 1 skipped"
    assert done.returncode == 1
    assert found["finished"]
    assert list(found["skipped"].values()) == ["no GPU"]
    (reason,) = found["failed"].values()
    assert "no luck" in reason or "assert 1 == 2" in reason


def test_files_of_tests_that_ran_at_this_commit_do_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    hangs = tmp_path / "test_two.py"
    hangs.write_text("def test_c(): assert False\n")
    _, found = outcomes(tmp_path, "first")
    assert (len(found["passed"]), list(found["failed"])) == (2, ["test_two.py::test_c"])
    half = found | {"files": {"test_one.py": "first"}, "finished": False}  # stopped in the second file
    (tmp_path / "found.json").write_text(json.dumps(half))
    (tmp_path / "test_one.py").write_text("def test_a(): assert False\n")
    hangs.write_text("def test_c(): pass\n")
    done, found = outcomes(tmp_path, "first")
    assert (done.returncode, sorted(found["passed"]), found["failed"]) == (
        0, ["test_one.py::test_a", "test_one.py::test_b", "test_two.py::test_c"], {}
    )  # fmt: skip
    assert found["files"] == {"test_one.py": "first", "test_two.py": "first"}
    _, found = outcomes(tmp_path, "second")  # all run again: names that are gone leave
    assert (found["passed"], list(found["failed"])) == (["test_two.py::test_c"], ["test_one.py::test_a"])
    assert set(found["files"].values()) == {"second"}


def test_rows_of_this_commit_are_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def sheet(commit: str, *names: str) -> Sheet:
        monkeypatch.setenv(COMMIT, commit)
        return Sheet(tmp_path / "rows.json", names)

    first = sheet("one", "a", "b", "c")
    first.put({"name": "b", "ms": 1})
    first.put({"name": "a", "failed": "no"})
    assert sheet("one", "a", "b", "c").left() == ["a", "c"]
    second = sheet("two", "c", "b", "a")
    assert second.left() == ["c", "b", "a"]
    second.put({"name": "c", "ms": 2})
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["name"], row["commit"]) for row in rows] == [("c", "two"), ("b", "one"), ("a", "one")]
    assert sheet("two", "c").found["rows"] == rows[:1]  # a row that is no longer measured leaves
    assert sheet("", "c").left() == ["c"]  # an unknown commit has measured nothing


# -- the largest context ----------------------------------------------------------------------------------------------

sizes = st.integers(50, 5000)


@given(slope=sizes, base=st.integers(0, 10**7), limit=st.integers(10**7, 10**8), bend=st.floats(0, 0.5))
def test_the_largest_context_is_found_with_few_failures(slope: int, base: int, limit: int, bend: float) -> None:
    """Memory that grows with the tokens, a little faster than by a line."""

    def need(tokens: int) -> int:
        return int(base + slope * tokens * (1 + bend * tokens * slope / limit))

    def attempt(tokens: int) -> Attempt:
        return Attempt(tokens, need(tokens), 1.0) if need(tokens) <= limit else Attempt(tokens)

    made = largest(attempt, 1024, limit, 1)
    best = max((one.tokens for one in made if one.fits), default=0)
    assert len(made) <= 2 + MAX_ATTEMPTS
    if need(1024) > limit:
        assert (best, len(made)) == (0, 1)
    else:
        assert need(int(best * (1.02 + 4 * LENGTH_TOLERANCE))) > limit
        assert sum(not one.fits for one in made) <= 3


def test_a_row_of_the_blocks_gives_back_what_it_changed() -> None:
    torch.manual_seed(0)
    job = Job(CPU, Sizes.at(CPU, layers=2, tokens=16))
    before = [vars(block).copy() for block in job.model.blocks]
    for row in ROWS:
        if not row.missing(on_gpu=False) and not row.share:
            with entered(row, job) as (enter, _):
                job.step(enter())
        assert [vars(block) for block in job.model.blocks] == before
