"""The source distribution, the wheel built from it, and the package as a stranger's environment sees it."""

import json
import re
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest

from actstore import __version__
from actstore.base import source
from actstore.devices import cpu_memory
from tests.release.environment import Environment, call

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path.name for path in (ROOT / "csrc").iterdir())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOOK = """
import json
from importlib.metadata import entry_points, version
from pathlib import Path
import actstore
from actstore.base import source
print(json.dumps({
    "file": actstore.__file__,
    "version": actstore.__version__,
    "metadata": version("actstore"),
    "typed": (Path(actstore.__file__).parent / "py.typed").exists(),
    "command": [point.value for point in entry_points(group="console_scripts", name="actstore")],
    "csrc": str(source.folder()),
    "digests": {path.stem: source.read(path.name).digest for path in source.folder().glob("*.cu")},
}))
"""


@pytest.fixture(scope="module")
def metadata(built) -> Message:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return BytesParser().parsebytes(archive.read(f"actstore-{__version__}.dist-info/METADATA"))


def test_the_wheel_holds_the_package_and_the_sources_of_the_kernels(built):
    [wheel] = built.glob("*.whl")
    assert wheel.name == f"actstore-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    files = {name for name in names if not name.startswith("actstore-")}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "actstore").rglob("*.py")}
    assert files == modules | {"actstore/py.typed", "actstore/inspection/page.html"} | {
        f"actstore/_csrc/{name}" for name in SOURCES
    }
    assert f"actstore-{__version__}.dist-info/licenses/LICENSE" in names


def test_a_wheel_can_bring_the_allocator(tmp_path, monkeypatch):
    if cpu_memory.compiler() is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setenv("ACTSTORE_BUILD_ALLOCATOR", "1")
    dist, installed = tmp_path / "dist", tmp_path / "installed"
    installed.mkdir()
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", dist, ROOT, cwd=tmp_path)
    [wheel] = dist.iterdir()
    assert re.fullmatch(rf"actstore-{re.escape(__version__)}-py3-none-linux_\w+\.whl", wheel.name)
    said = Environment(installed, wheel).run(
        "-c",
        "import os; os.environ.update(PATH='/nowhere', XDG_CACHE_HOME='/nowhere')\n"
        "from actstore.devices import cpu_memory; print(cpu_memory.install())",
    )
    assert said.strip() == "pages"


def test_the_source_distribution_holds_what_a_developer_needs(built):
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "hatch_build.py", ".ci/run"}
    wanted |= {"pyproject.toml", "requirements-dev.txt", "tests/conftest.py"}
    assert wanted | {f"csrc/{name}" for name in SOURCES} | {Path(__file__).relative_to(ROOT).as_posix()} <= files


def test_the_metadata_is_what_an_index_takes(metadata):
    classifiers = pytest.importorskip("trove_classifiers").classifiers
    assert metadata["Name"] == "actstore"
    assert metadata["Version"] == __version__
    assert metadata["Metadata-Version"] == "2.4"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra")) == set(EXTRAS)
    assert set(metadata.get_all("Classifier")) <= classifiers
    base = {need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need}
    assert base == set(PROJECT["dependencies"])


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"]
    version = re.compile(rf"(?<![\d.]){re.escape(__version__)}(?![\d.])")
    for path in (ROOT / "actstore").rglob("*.py"):
        assert path.name == "_version.py" or not version.search(path.read_text()), path


def test_the_long_description_needs_nothing_of_the_repository(metadata):
    """It is README, and no link or picture of it leads to a file."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert text.startswith("# actstore\n")
    tokens = [inner for token in markdown.parse(text) for inner in token.children or ()]
    aims = [token.attrGet("href") or token.attrGet("src") for token in tokens if token.type in ("link_open", "image")]
    assert [aim for aim in aims if not aim.startswith(("https://", "#"))] == []
    assert "![" not in text
    readme = (ROOT / "README.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in readme.splitlines() if line.startswith("#")
    ]
    assert len(text) > 0.9 * len(readme)


def test_an_installed_actstore_finds_its_kernels(bare):
    seen = json.loads(bare.run("-c", LOOK))
    package = Path(seen["file"]).parent
    assert package.parent == bare.packages
    assert seen["version"] == seen["metadata"] == __version__
    assert seen["typed"]
    assert seen["command"] == ["actstore.cli.app:main"]
    assert Path(seen["csrc"]).parent == package
    assert sorted(path.name for path in Path(seen["csrc"]).iterdir()) == SOURCES
    assert seen["digests"] == {path.stem: source.read(path.name).digest for path in (ROOT / "csrc").glob("*.cu")}


def test_what_is_installed_with_it_is_what_it_requires(bare):
    said = call(sys.executable, "-m", "pip", "--python", bare.python, "check", cwd=bare.folder)
    assert "No broken requirements found" in said


# -- extras -----------------------------------------------------------------------------------------------------------

NAMED = re.compile(r"(?:actstore|'\.)\[([\w,]+(?:\{major\})?)\]")
NEEDED = {
    "bench": {"matplotlib", "scikit-learn"},
    "bnb": {"bitsandbytes"},
    "bytes": {"blosc2"},
    "cpu": {"numba"},
    "cuda12": {"cupy-cuda12x"},
    "cuda13": {"cupy-cuda13x"},
    "disk": {"xxhash"},
    "docs": {"actstore", "mkdocs-material", "mkdocstrings"},
    "gds12": {"kvikio-cu12"},
    "gds13": {"kvikio-cu13"},
    "hf": {"accelerate", "transformers"},
    "lightning": {"lightning"},
    "plan": {"scipy"},
}


def test_each_extra_is_known_and_holds_what_its_name_says():
    found = {
        extra: {re.split(r"[\[<>=]", need)[0] for need in needs} for extra, needs in EXTRAS.items() if extra != "all"
    }
    assert found == NEEDED


def test_all_is_every_extra_that_installs_anywhere():
    [everything] = EXTRAS["all"]
    assert set(NAMED.fullmatch(everything)[1].split(",")) == {
        extra for extra in EXTRAS if not extra.startswith(("cuda", "gds", "docs", "all"))
    }


def test_every_extra_that_a_text_names_exists():
    texts = [*(ROOT / "actstore").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {
        (extra, path.name)
        for path in texts
        for group in NAMED.findall(path.read_text())
        for part in group.split(",")
        for extra in ([part.replace("{major}", major) for major in ("12", "13")] if "{major}" in part else [part])
    }
    assert {extra for extra, _ in named} >= {"cpu", "cuda12", "cuda13", "plan", "bench", "bnb", "bytes", "gds13"}
    assert {(extra, name) for extra, name in named if extra not in EXTRAS} == set()
