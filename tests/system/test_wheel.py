"""The source distribution, the wheel built from it, and the package as a stranger's environment sees it."""

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from actstore import __version__
from actstore.kernels import source

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path.name for path in (ROOT / "csrc").iterdir() if path.suffix in (".cu", ".cuh", ".md"))
LOOK = """
import json
from importlib.metadata import entry_points, version
from pathlib import Path
import actstore
from actstore.kernels import source
print(json.dumps({
    "file": actstore.__file__,
    "version": actstore.__version__,
    "metadata": version("actstore"),
    "typed": (Path(actstore.__file__).parent / "py.typed").exists(),
    "command": [point.value for point in entry_points(group="console_scripts", name="actstore")],
    "csrc": str(source.folder()),
    "digests": {path.stem: source.read(path.stem).digest for path in source.folder().glob("*.cu")},
}))
"""


def call(*command: object, cwd: Path) -> str:
    run = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the source distribution and the wheel built from it."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The Python of an environment that holds the wheel, torch and NumPy, and nothing of this checkout."""
    folder = tmp_path_factory.mktemp("installed")
    python = folder / "venv" / "bin" / "python"
    call(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    borrowed = {str(Path(module.__file__).parents[1]) for module in (torch, np)}
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    [wheel] = built.glob("*.whl")
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return python


def test_the_wheel_holds_the_package_and_the_sources_of_the_kernels(built):
    [wheel] = built.glob("*.whl")
    assert wheel.name == f"actstore-{__version__}-py3-none-any.whl"
    files = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("actstore-")}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "actstore").rglob("*.py")}
    assert files == modules | {"actstore/py.typed"} | {f"actstore/_csrc/{name}" for name in SOURCES}


def test_the_source_distribution_holds_what_a_developer_needs(built):
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "Makefile", "README.md", "CHANGELOG.md", "pyproject.toml", "requirements-dev.txt", ".ci/run"}
    assert (
        wanted
        | {f"csrc/{name}" for name in SOURCES}
        | {"tests/conftest.py", Path(__file__).relative_to(ROOT).as_posix()}
        <= files
    )


def test_an_installed_actstore_finds_its_kernels(installed, tmp_path):
    seen = json.loads(call(installed, "-I", "-c", LOOK, cwd=tmp_path))
    package = Path(seen["file"]).parent
    assert ROOT not in package.parents
    assert seen["version"] == seen["metadata"] == __version__
    assert seen["typed"]
    assert seen["command"] == ["actstore.bench.cli:main"]
    assert Path(seen["csrc"]).parent == package
    assert sorted(path.name for path in Path(seen["csrc"]).iterdir()) == SOURCES
    assert seen["digests"] == {path.stem: source.read(path.stem).digest for path in (ROOT / "csrc").glob("*.cu")}
