"""The command ``actstore doctor``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from actstore.cli import commands
from actstore.cli import machine as facts
from actstore.cli.doctor import render
from actstore.cli.machine import PINNED_NBYTES, Allocator, Cuda, Gpu, Machine, disk, driver, machine
from actstore.devices.host_memory import cgroup_limit

ROOT = Path(__file__).parents[2]
OPTIONAL = (
    "numba", "cupy", "scipy", "blosc2", "bitsandbytes", "xxhash", "kvikio", "transformers", "accelerate", "lightning",
    "matplotlib", "sklearn",
)  # fmt: skip
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
WITHOUT = """
import sys

without = sys.argv.pop(1).split(",")

class Without:
    def find_spec(self, name, path=None, target=None):
        if name in without:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
from actstore.cli.app import main
main()
"""


def doctor(tmp_path: Path, without: str = "", **environment: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text and facts of the command in a process of its own, without these packages."""
    file = tmp_path / "facts.json"
    command = [sys.executable, "-W", "error", "-c", WITHOUT, without, "doctor", "--folder", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [*command, "--json", str(file)], env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout, json.loads(file.read_text())


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return machine(tmp_path_factory.mktemp("disk"))


def text(found: Machine, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(render(found))
    return captured.get()


def test_it_tells_the_facts_of_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    done = CliRunner().invoke(commands.app, ["doctor", "--folder", str(tmp_path), "--json", str(file)])
    assert done.exit_code == 0, done.output
    facts = json.loads(file.read_text())
    assert facts["format"] == "actstore doctor 1"
    assert facts["broken"] == []
    assert facts["packages"]["torch"]["state"] == "installed"
    assert facts["disk"]["folder"] == str(tmp_path)
    assert facts["disk"]["write_bytes_per_s"] > 0
    assert facts["disk"]["read_bytes_per_s"] > 0
    assert facts["disk"]["free_bytes"] > 0
    assert facts["memory"]["total_bytes"] > facts["memory"]["available_bytes"] > 0
    assert list(tmp_path.iterdir()) == [file]
    for title in ("Versions", "Codecs on the CPU", "Allocator of CPU tensors", "Disk tier", "Memory", "GPU"):
        assert f"\n{title}\n" in re.sub(" +\n", "\n", done.output)
    assert "Everything checked works." in done.output


@pytest.mark.parametrize("width", [80, 120])
def test_it_is_legible(here: Machine, width: int) -> None:
    said = text(here, width)
    assert max(map(len, said.splitlines())) <= width
    assert "…" not in said


def test_without_all_optional_packages_it_names_the_command_of_each(tmp_path: Path) -> None:
    code, said, facts = doctor(tmp_path, ",".join(OPTIONAL))
    assert code == 0
    commands = [each["command"] for each in facts["missing"]]
    for extra in ("cpu", "bytes", "bnb", "disk", "plan", "bench", "hf", "lightning"):
        assert f"pip install 'actstore[{extra}]'" in commands
        assert f"pip install 'actstore[{extra}]'" in said
    assert facts["kernels"][0]["back_end"] == "PyTorch operations"
    assert {facts["packages"][name]["state"] for name in OPTIONAL} == {"missing"}


@pytest.mark.parametrize("name", [name for name in OPTIONAL if name not in ("cupy", "kvikio")])
def test_one_package_that_is_missing_is_one_feature(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    find = facts.find_spec
    monkeypatch.setattr(facts, "IMPORTED", ())
    monkeypatch.setattr(facts, "find_spec", lambda each: find("torch") if each != name else None)
    found = facts.packages()
    assert found[name] == facts.Package(name, "missing")
    (missing,) = facts.missing(found, None)
    extra = re.fullmatch(r"pip install 'actstore\[(\w+)\]'", missing.command)
    assert extra is not None
    wanted = facts.DISTRIBUTIONS.get(name, (name,))
    assert any(re.match(rf"{each}\b", need) for each in wanted for need in EXTRAS[extra[1]])


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_what_is_for_gpus_is_named_where_there_is_one(cuda: str) -> None:
    found = {name: facts.Package(name, "missing") for name in facts.NAMES}
    here = {each.command for each in facts.missing(found, cuda)}
    elsewhere = {each.command for each in facts.missing(found, None)}
    assert here - elsewhere == {f"pip install 'actstore[cuda{cuda}]'", f"pip install 'actstore[gds{cuda}]'"}
    assert {f"cuda{cuda}", f"gds{cuda}"} <= set(EXTRAS)


def test_a_package_whose_import_fails_is_broken(monkeypatch: pytest.MonkeyPatch, here: Machine) -> None:
    def fail(name: str) -> None:
        raise OSError(f"lib{name}.so: cannot open shared object file")

    monkeypatch.setattr(facts, "import_module", fail)
    monkeypatch.setattr(facts, "find_spec", lambda _: object())
    found = replace(here, packages=facts.packages())
    assert "numba is installed, but its import fails: OSError: libnumba.so: cannot open shared object file" in (
        found.broken
    )
    assert "Everything checked works." not in text(found, 100)


def test_a_folder_that_cannot_hold_the_tier_is_broken() -> None:
    done = CliRunner().invoke(commands.app, ["doctor", "--folder", "/no/such/folder"])
    assert done.exit_code == 1
    said = " ".join(done.output.split())
    assert "Disk(path='/no/such/folder') cannot hold the disk tier: No such file or directory" in said
    assert "Everything checked works." not in said


def test_a_compiler_that_fails_is_broken_and_none_is_not(tmp_path: Path) -> None:
    code, said, facts = doctor(tmp_path, CXX="false", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert code == 1
    assert "The allocator of CPU tensors does not work: false cannot compile" in said
    assert facts["allocator"]["compiler"] == "false"
    none = Allocator("pages", "threshold", "no C++ compiler", None, None)
    assert not none.is_broken
    assert not Allocator("system", "system", "", None, "c++").is_broken
    assert not Allocator("pages", "system", "malloc is that of tcmalloc", None, "c++").is_broken


def test_a_variable_with_another_word_is_broken(tmp_path: Path) -> None:
    code, said, facts = doctor(tmp_path, ACTSTORE_CPU_ALLOCATOR="paper")
    assert (code, facts["allocator"]["choice"]) == (1, "unknown")
    assert "ACTSTORE_CPU_ALLOCATOR='paper': must be one of" in " ".join(said.split())


def test_without_a_compiler_it_says_how_to_get_one(here: Machine) -> None:
    found = replace(here, allocator=Allocator("pages", "threshold", "no C++ compiler", None, None))
    assert [each.command for each in found.missing if each.feature == "allocator of CPU tensors"] == ["apt install g++"]


def test_a_slow_disk_is_measured_with_fewer_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "PASS_LIMIT_S", 0.0)
    found = disk(tmp_path)
    assert found.write_bytes_per_s
    assert found.read_bytes_per_s


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Machine) -> None:
    monkeypatch.setattr(facts.DiskTier, "reserve", lambda *_: None)
    found = disk(tmp_path)
    assert (found.write_bytes_per_s, found.error) == (None, "")
    assert "not measured: the disk is full" in text(replace(here, disk=found), 80)


def test_a_folder_in_memory_is_said(here: Machine) -> None:
    found = replace(here, disk=replace(here.disk, file_system="tmpfs", in_memory=True))
    assert "tmpfs: memory, not a disk" in text(found, 80)


CGROUPS = {
    "version 2": ("0::/a/b\n", {"a/memory.max": "300", "a/b/memory.max": "max"}, 300),
    "version 2, of a container": ("0::/\n", {"memory.max": "500\n"}, 500),
    "version 1": (
        "4:memory:/a\n0::/\n",
        {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/a/memory.limit_in_bytes": "700"},
        700,
    ),
    "version 1, with others": ("3:cpu,memory:/a\n2:pids:/\n", {"memory/a/memory.limit_in_bytes": "800"}, 800),
    "no limit": ("0::/a\n", {"a/memory.max": "max"}, None),
    "nothing": ("", {}, None),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_the_least_limit_of_control_groups(case: str, tmp_path: Path) -> None:
    groups, files, limit = CGROUPS[case]
    for path, content in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{at}": had for at, had in files.items()},
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    assert cgroup_limit(tmp_path) == limit


DRIVERS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12\n": (
        "535.104.05"
    ),
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n": "550.54.15",
    "something else": "unknown",
}


@pytest.mark.parametrize("content", DRIVERS)
def test_the_version_of_the_driver(content: str, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(content)
    assert driver(tmp_path / "version") == DRIVERS[content]
    assert driver(tmp_path / "none") is None


def test_gpus_are_shown(here: Machine) -> None:
    found = replace(here, cuda=Cuda("CUDA 12.8", "550.54.15", (Gpu("A GPU", 80 << 30, "9.0"),), PINNED_NBYTES))
    said = text(found, 80)
    for part in ("A GPU, 80.0 GiB, capability 9.0", "CUDA 12.8", "550.54.15", "1.0 GiB can be pinned"):
        assert part in said
    refused = replace(found, cuda=replace(found.cuda, pinned_bytes=0))
    assert "cannot be pinned" in text(refused, 80)
    without = replace(here, cuda=Cuda(None, "550.54.15"))
    assert "this PyTorch is built without CUDA" in text(without, 80)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    found = machine(tmp_path)
    assert found.cuda.devices
    assert found.cuda.driver
    assert found.cuda.pinned_bytes == PINNED_NBYTES
    assert [each.device for each in found.kernels] == ["CPU", "GPU"]
