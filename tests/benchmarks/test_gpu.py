"""The GPU suite: what can be tested of it without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actstore.bench.codecs.contenders import OurTrip, select
from actstore.bench.environment import environment
from actstore.bench.result import Result, RowResult
from actstore.codecs import Int8, Raw
from benchmarks.gpu import (
    compile as gpu_compile,
)
from benchmarks.gpu import (
    device as gpu_device,
)
from benchmarks.gpu import (
    exact as gpu_exact,
)
from benchmarks.gpu import (
    page as gpu_page,
)
from benchmarks.gpu import (
    parts as gpu_parts,
)
from benchmarks.gpu import (
    place as gpu_place,
)
from benchmarks.gpu import (
    run as gpu,
)
from benchmarks.gpu import (
    sanitizer as gpu_sanitizer,
)
from benchmarks.gpu.place import Place

CPU = Place("cpu", small=True)
COPY = {"ms": 1.0, "low_ms": 0.9, "high_ms": 1.1, "gbps": 1000.0}


@pytest.mark.parametrize(
    ("text", "dtype", "name"),
    [
        ("raw", torch.bfloat16, "gaussian"),
        ("int8", torch.float32, "gaussian"),
        ("zmask", torch.bfloat16, "relu"),
        ("zmask(int8)", torch.bfloat16, "relu"),
    ],
)
def test_a_row_of_a_kernel(text: str, dtype: torch.dtype, name: str) -> None:
    (contender,), _ = select([text])
    row = gpu_device.kernel_row(contender, dtype, name, 1.0, CPU, nbytes=1 << 22)
    assert row["correct"]
    assert (row["error"] == 0) == ("int8" not in text)
    assert row["ratio"] >= 1


@pytest.mark.parametrize("way", ["nothing is written", "another value"])
def test_kernels_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    (contender,), _ = select(["int8"])
    decode = OurTrip.decode
    if way == "another value":
        monkeypatch.setattr(OurTrip, "decode", lambda trip: decode(trip) * 1.001)
    else:
        monkeypatch.setattr(OurTrip, "decode", lambda trip: trip.out)
    row = gpu_device.kernel_row(contender, torch.float32, "gaussian", 1.0, CPU, nbytes=1 << 22)
    assert not row["correct"]
    assert row["error"] < 0.01 or way == "nothing is written"


def test_rate() -> None:
    found = gpu_device.rate([1.0, 2.0, 3.0], 2 * 10**9)
    assert found["ms"] == 2.0
    assert found["gbps"] == 1000.0


@pytest.mark.parametrize(("failed", "joules"), [(0, 12.5), (3, None)])
def test_energy_is_what_nvml_tells(monkeypatch: pytest.MonkeyPatch, failed: int, joules: float | None) -> None:
    class Nvml:
        def nvmlDeviceGetTotalEnergyConsumption(self, device: object, found: Any) -> int:
            assert device == "device"
            found._obj.value = 12_500  # millijoules
            return failed

    monkeypatch.setattr(gpu_place, "_nvml", Nvml)
    monkeypatch.setattr(gpu_place, "_nvml_device", lambda: "device")
    assert Place("cuda").energy_j() == joules
    assert CPU.energy_j() is None


def test_a_lossless_row_that_is_not_exact_is_named(result: Result) -> None:
    for row in result.rows:
        row.bit_equal, row.loss_hex, row.failed = True, result.rows[0].loss_hex, ""
    assert gpu_exact.inexact(result) == []
    result.rows[1].loss_hex = (3.5).hex()
    result.rows[2].bit_equal = False
    assert gpu_exact.inexact(result) == [row.name for row in result.rows[1:3]]


@pytest.mark.parametrize("place", [Place("cuda"), CPU])
def test_the_exact_rows_are_there_and_plain_is_first(place: Place) -> None:
    work, rows = gpu_exact.job(place)
    assert work.device == place.device
    assert rows[0].name == "plain"
    assert {row.name for row in rows} == set(place.sized(gpu_exact.LOSSLESS, gpu_exact.DRY_ROWS[:2]))
    _, timed = gpu_exact.job(place, times=True)
    assert {row.name for row in timed} == set(place.sized(gpu_exact.TIMED, gpu_exact.DRY_ROWS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", gpu.__name__, "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=gpu.ROOT, env={"PYTHONPATH": "."}, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("no CUDA device here")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [["--scale", "small"], ["--results", "elsewhere"]])
def test_a_dry_run_is_small_and_never_among_the_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", *options])
    monkeypatch.setattr(gpu, "run_all", lambda *_: pytest.fail("it ran"))
    assert gpu.main() == 2
    assert "RESULTS=a folder of its own" in capsys.readouterr().err


def test_a_part_keeps_what_it_wrote_when_its_time_ends(tmp_path: Path) -> None:
    code = "import sys, time; open(sys.argv[1], 'w').write('[1]'); print('so far', flush=True); time.sleep(60)"
    found = gpu.run_part(gpu.Part("slow", ("-c", code, "{json}")), 3, tmp_path, CPU)
    assert found["status"] == "stopped"
    assert found["seconds"] < 30
    assert found["said"] == "so far"
    assert found["figures"] == [1]


def test_a_part_that_fails_says_its_last_line(tmp_path: Path) -> None:
    found = gpu.run_part(gpu.Part("bad", ("-c", "raise SystemExit('no luck')")), 60, tmp_path, CPU)
    assert (found["status"], found["said"], found["figures"]) == ("failed", "no luck", None)


@pytest.mark.parametrize(("name", "status"), [("absent", "left out"), ("benchmarks.absent", "failed")])
def test_a_part_whose_package_is_missing_is_left_out(tmp_path: Path, name: str, status: str) -> None:
    found = gpu.run_part(gpu.Part("lacks", ("-c", f"import {name}")), 60, tmp_path, CPU)
    assert found["status"] == status
    assert status == "failed" or found["said"] == "absent is not installed"


def test_every_part_has_its_page_and_its_place() -> None:
    assert {part.name for part in gpu.PARTS} == set(gpu_page._TITLES)
    alone = [part.alone for part in gpu.PARTS]
    assert alone == sorted(alone)  # those side by side are neighbors


def test_the_sources_are_compiled_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    started: list[str] = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            started.append(command[-1])

        def wait(self) -> int:
            return int(started[-1] == "bad")

    monkeypatch.setattr(gpu_compile, "find_spec", lambda name: name)
    monkeypatch.setattr(
        gpu_compile.launch, "_module", lambda name: SimpleNamespace(compile=lambda: compiled.append(name))
    )
    monkeypatch.setattr(gpu_compile.subprocess, "Popen", Process)
    assert gpu_compile.main(["int8", "raw"]) == 0
    assert (compiled, started) == (["int8", "raw"], [])
    assert gpu_compile.main([]) == 0
    assert {"affine", "int8", "sparse"} <= set(started)
    monkeypatch.setattr(gpu_compile, "names", lambda: ["bad"])
    assert gpu_compile.main([]) == 1


def test_all_tests_for_a_gpu_are_run() -> None:
    marked = {
        str(path.relative_to(gpu.ROOT))
        for path in (gpu.ROOT / "tests").rglob("test_*.py")
        if "pytest.mark." + "gpu" in path.read_text()
    }
    assert marked == {gpu_parts.CODECS, *gpu_parts.TESTS}


def test_without_the_sanitizer_its_part_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_sanitizer.py"])
    monkeypatch.setattr(gpu_sanitizer, "sanitizer", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_sanitizer.main() == 0
    assert capsys.readouterr().out.startswith("not run: compute-sanitizer is not installed")


@pytest.mark.parametrize(("code", "words"), [(0, "0 errors"), (9, "2 errors")])
def test_what_the_sanitizer_finds_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, words: str
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho '========= ERROR SUMMARY: {words}'\nexit {code}\n")
    program.chmod(0o755)
    assert gpu_sanitizer.run(str(program), tmp_path / "said.json") == (code != 0)
    assert json.loads((tmp_path / "said.json").read_text())["clean"] == (code == 0)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == f"memcheck: {words}; racecheck: {words}; synccheck: {words}"


def test_the_sanitizer_sees_every_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sanitizer.find, "variants", lambda: [Int8(), Raw()])
    assert gpu_sanitizer.trips(Place("cpu")) == 2 * 3 * len(gpu_sanitizer.SHAPES)


def test_results_are_written_after_each_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "environment", lambda: environment() | {"gpu": "Some GPU (80 GB)"})
    code = "import sys; open(sys.argv[1], 'w').write('[]'); print('3 trips')"
    parts = [gpu.Part("sanitizer", ("-c", code, "{plot}")), gpu.Part("late", ("-c", ""))]
    monkeypatch.setattr(gpu, "PICTURES", ("sanitizer.png",))
    assert gpu.run_all(parts[:1], tmp_path / "out", tmp_path / "work", Place("cuda"), 60) == 0
    assert gpu.run_all(parts[1:], tmp_path / "out", tmp_path / "work", Place("cuda"), 0) == 1
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"some-gpu-80-gb.json", "some-gpu-80-gb.md", "some-gpu-80-gb-sanitizer.png"}
    page = (tmp_path / "out" / "some-gpu-80-gb.md").read_text()
    assert "3 trips" in page
    assert "dry run" not in page.lower()


def test_a_run_goes_on_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def code(says: str, ends: int) -> tuple[str, ...]:
        written = json.dumps(json.dumps({"first": says}))
        return "-c", f"import sys; open(sys.argv[1], 'w').write({written}); sys.exit({ends})", "{json}"

    def run(says: str, ends: int, commit: str) -> dict[str, Any]:
        parts[:] = [gpu.Part("sanitizer", code(says, ends)), gpu.Part("other", code(says, 0))]
        gpu.run_all(gpu.left(parts, found(), commit), tmp_path, tmp_path / "work", CPU, 60, commit)
        return found()

    def found() -> dict[str, Any]:
        file = tmp_path / "dry-run.json"
        return json.loads(file.read_text())["parts"] if file.exists() else {}

    parts: list[gpu.Part] = []
    assert run("first", 1, "one")["sanitizer"]["status"] == "failed"
    assert run("second", 0, "one")["sanitizer"]["figures"] == {"first": "second"}  # what failed, once nothing is left
    assert found()["other"]["figures"] == {"first": "first"}
    assert gpu.left(parts, found(), "one") == []
    assert gpu.left(parts, found(), "two") == gpu.left(parts, found(), "") == parts
    later = run("third", 1, "two")["sanitizer"]
    assert (later["figures"], later["commit"], later["status"]) == ({"first": "second"}, "one", "ok")
    assert later["later"]["commit"] == "two"
    assert [part.name for part in gpu.left(parts, found(), "two")] == ["sanitizer"]
    assert "Older figures: a run of commit two failed" in (tmp_path / "dry-run.md").read_text()


def test_a_part_with_rows_begins_with_those_of_earlier_runs(tmp_path: Path) -> None:
    part = gpu.Part("rows", ("-c", "import sys; print(open(sys.argv[1]).read())", "{json}"), resumes=True)
    result = gpu.run_part(part, 60, tmp_path, CPU, "two", {"figures": {"rows": [1]}, "commit": "one"})
    assert (result["said"], result["figures"], result["commit"]) == ('{"rows": [1]}', {"rows": [1]}, "two")


def test_the_page_shows_what_was_measured_and_nothing_else(result: Result) -> None:
    env = environment() | {"gpu": "Some GPU"}
    kernel = {"name": "int8 float32", "data": "gaussian"}
    measured = kernel | {"error": 0.006, "ratio": 3.94, "correct": True, "encode": COPY | {"of_copy": 0.9}}
    figures: dict[str, Any] = {
        "transfer": {
            "ceilings": {"nbytes": 2**20, "device_copy": COPY},
            "goals": {},
            "failed": {},
            "policy": "raw @ host",
        },
        "kernels": {
            "nbytes": 2**20,
            "device_copy": COPY,
            "rows": [
                measured,
                measured | {"correct": False},
                kernel | {"correct": False, "failed": "KernelBuildError: no"},
                kernel | {"left_out": "runs on a CPU"},
            ],
        },
        "exact": json.loads(result.to_json()),
        "hotpath": {"unit_us": 2.5, "rows": {"kept": {"added_us": 5.0, "chain": 2.0, "direct": 2.1}}},
    }
    parts = {
        name: {"environment": env, "status": "ok", "seconds": 1.0, "said": "", "figures": values}
        for name, values in figures.items()
    }
    parts["llama"] = {"environment": env, "status": "stopped", "seconds": 9.0, "said": "a | b", "figures": None}
    page = gpu_page.page({"gpu": "Some GPU", "dry_run": False, "parts": parts}, {})
    for words in (
        "| device copy, read plus written | 1000.0 |",
        "| int8 float32 | gaussian | 3.94 | 0.600 % | 1000 | 90 % | - | - |",
    ):
        assert words in page
    assert "**WRONG**" in page
    assert "- int8 float32 **failed**: KernelBuildError: no" in page
    assert "- int8 float32 is left out: runs on a CPU" in page
    assert "pinned host" not in page
    assert "**stopped** after 9.0 s: a \\| b" in page
    waiting = page.partition("## What waits for a machine\n")[2].partition("\n## ")[0]
    assert "- Loss curves: derive(int8); int8; keep; recompute(int8).\n" in waiting
    assert "- The transfer engine: exposed; hidden; link; payloads; pinning; price; steady.\n" in waiting
    for title in gpu_page._TITLES.values():
        assert (f"- {title}: " in waiting) == (title not in ("Codecs", "Host time for a saved tensor of 4 KB")), title
    assert "- Random models under lossy policies: all of it.\n" in waiting
    assert "- raw @ disk failed: OSError: the disk is full" in page
    other = {"exact": parts["exact"] | {"environment": env | {"gpu": None}}}  # of a CPU
    page = gpu_page.page({"gpu": "Some GPU", "dry_run": False, "parts": other}, {})
    assert "## Exactness" not in page
    assert "- Exactness in float32: derive; expack; plain; " in page


def test_published_pages_are_written_from_their_figures() -> None:
    published = [path for path in gpu.RESULTS.glob("*.md") if path.with_suffix(".json").exists()]
    assert published
    for path in published:
        found = json.loads(path.with_suffix(".json").read_text())
        assert not found["dry_run"]
        assert {part["environment"]["gpu"] for part in found["parts"].values()} == {found["gpu"]}
        pictures = {file: f"{path.stem}-{file}" for file in gpu_parts.PICTURES}
        drawn = {file: name for file, name in pictures.items() if (gpu.RESULTS / name).exists()}
        assert path.read_text() == gpu_page.page(found, drawn), f"run python -m benchmarks.gpu.run --page {path.stem}"


def test_rows_that_this_commit_has_trained_do_not_train_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trained: list[list[str]] = []

    def run(work: Any, rows: list[Any], row_done: Any) -> Result:
        trained.append([row.name for row in rows])
        found = Result({}, work.to_dict())
        for row in rows:
            fails = "stopped" if len(trained) == 1 and row.name == "derive" else ""
            found.rows.append(RowResult(row.name, row.kind, bit_equal=True, loss_hex=(3.0).hex(), failed=fails))
            row_done(found)
        return found

    monkeypatch.setattr(gpu_exact, "run", run)
    work, rows = gpu_exact.job(Place("cuda"))
    path = tmp_path / "exact.json"
    for commit in ("one", "one", "one", "two"):
        monkeypatch.setenv(gpu_place.COMMIT, commit)
        result = gpu_exact.run_all(work, rows, path)
        assert [row.name for row in result.rows] == [row.name for row in rows]
    names = [row.name for row in rows]
    assert trained == [names, ["plain", "derive"], names]
    assert (gpu_exact.inexact(result), result.failed, result.workload) == ([], [], work.to_dict())
