"""The floors of the package: rooms import lower rooms only, and nothing imports in a circle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.floors import (
    CONTRIBUTING,
    PACKAGE,
    circles,
    floors_of,
    imports_of,
    rooms_of,
    table_of,
    upward,
    written_floors,
    written_table,
)

MOST_FLOORS = 14
MOST_FOLDERS = 27
LOOSE = {"__init__", "__main__", "_version", "errors"}
TABLE = written_table(CONTRIBUTING.read_text(encoding="utf-8"))


def test_the_floors_are_few() -> None:
    imports = imports_of(PACKAGE)
    assert circles(PACKAGE, imports) == []
    assert upward(imports, written_floors(TABLE)) == []
    assert max(floors_of(rooms_of(PACKAGE, imports)).values()) <= MOST_FLOORS


def test_every_module_is_in_a_room() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == LOOSE
    assert len([path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]) <= MOST_FOLDERS
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_table_in_contributing_is_computed() -> None:
    made = table_of(PACKAGE, floors_of(rooms_of(PACKAGE, imports_of(PACKAGE))))
    assert made == TABLE, "run: python -m tests.system.floors"
    assert all(row.rstrip(" |").endswith((".", "`")) for row in made.splitlines()[2:]), "a room without a docstring"


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("tiers/host.py", "from actstore.store.store import Store", "upward"),
        ("tiers/host.py", "import actstore.store as s", "upward"),
        ("tiers/host.py", "from actstore import store", "upward"),
        ("tiers/host.py", "from actstore import ActivationStore", "upward"),
        ("tiers/host.py", "import actstore", "upward"),
        ("tiers/host.py", "from ..store import Store", "upward"),
        ("tiers/host.py", "from .. import store", "upward"),
        ("tiers/host.py", "def f():\n    from actstore.autograd.hooks import Scope", "upward"),
        ("tiers/host.py", "if TYPE_CHECKING:\n    from actstore.session import ActivationStore", "upward"),
        ("kernels/cuda/launch.py", "from actstore.codecs.base import Codec", "upward"),
        ("kernels/base.py", "from actstore.tiers import Tier", "upward"),
        ("codecs/base.py", "from actstore.policy import Keep", "upward"),
        ("base/ledger.py", "from actstore.trace.event import Event", "upward"),
        ("integrations/lightning.py", "from actstore.bench.trainer import timing", "upward"),
        ("__init__.py", "from actstore.cli.app import main", "upward"),
        ("helpers/__init__.py", "from actstore.errors import ConfigError", "upward"),
        ("codecs/int8.py", "from actstore.kernels import launch", None),
        ("policy/rules.py", "from actstore.codecs import registry", None),
        ("tiers/host.py", "from actstore.tiers.base import Tier", None),
        ("tiers/host.py", "from .base import Tier", None),
        ("tiers/host.py", "import torch, os.path\nfrom actstore.errors import TransferError", None),
        ("tiers/host.py", "from actstore.devices import Device", None),
        ("__main__.py", "from actstore.cli.app import main", None),
    ],
)
def test_a_planted_import_is_judged(tmp_path: Path, path: str, source: str, found: str | None) -> None:
    package = _package(tmp_path, {path: source})
    result = upward(imports_of(package), written_floors(TABLE))
    assert len(result) == (found is not None)
    assert not result or result[0].startswith(f"actstore{'.' + path.split('/', maxsplit=1)[0] if '/' in path else ''}")


@pytest.mark.parametrize(
    "planted",
    [
        {"codecs/raw.py": "import actstore.tiers", "tiers/host.py": "from actstore.codecs import raw"},
        {"codecs/raw.py": "from actstore.codecs.int8 import x", "codecs/int8.py": "def f():\n    from . import raw"},
        {"kernels/a.py": "from actstore.kernels.cpu import b", "kernels/cpu/b.py": "from actstore.kernels import a"},
        {"tiers/a.py": "from . import b", "tiers/b.py": "from . import c", "tiers/c.py": "import actstore.tiers.a"},
    ],
    ids=["rooms", "modules", "folders", "three"],
)  # fmt: skip
def test_a_planted_circle_is_found(tmp_path: Path, planted: dict[str, str]) -> None:
    package = _package(tmp_path, planted)
    assert len(circles(package, imports_of(package))) == 1


def _package(folder: Path, files: dict[str, str]) -> Path:
    """A package called actstore with these files, and empty ones for every module that the real one has."""
    package = folder / "actstore"
    for path in PACKAGE.rglob("*.py"):
        copy = package / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    for path, source in files.items():
        file = package / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return package
