"""The floors of the package: a file imports only from lower ones."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "actstore"

# From the ground up. A set is a room: its files may import each other and every lower floor, but no other room.
FLOORS = (
    (
        {
            "_version",
            "errors",
            "extensions",
            "units",
            "spec",
            "layout",
            "reaper",
            "storage",
            "ticket",
            "job",
            "checksum",
            "generators",
            "weights",
            "untraced",
            "surroundings",
            "trees",
            "html",
            "pictures",
        },
    ),
    ({"devices"},),
    ({"kernels"}, {"codecs"}, {"tiers"}, {"policy"}, {"trace"}, {"ledger"}),
    ({"transfer"}, {"plan"}, {"encoded"}),
    ({"store", "entry", "verified", "tierset", "links", "accuracy", "protect"},),
    (
        {
            "hooks",
            "modules",
            "recompute",
            "replay",
            "schedule",
            "handles",
            "derived",
            "composite",
            "regions",
            "census",
            "checkpoints",
            "compiled",
            "profiler",
            "moments",
            "shapes",
        },
    ),
    ({"session", "arguments", "aliases", "report", "advice", "auto", "chooser", "inputs", "pairs", "probes", "retry"},),
    ({"check", "planning"},),
    ({"__init__"},),  # the public names, which the floor above uses as any user does
    ({"integrations"}, {"bench", "cli", "__main__"}, {"testing"}),
)
SIDEWAYS = {("codecs", "kernels"), ("policy", "codecs")}
PLACES = {name: (floor, room) for floor, rooms in enumerate(FLOORS) for room in rooms for name in room}


def imported(tree: ast.AST, package: str, members: set[str]) -> Iterator[tuple[int, str]]:
    """Every first-level part of actstore that a file of `package` imports, wherever in it, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            modules = [f"{module}.{alias.name}" for alias in node.names] if module == "actstore" else [module]
        else:
            continue
        for module in modules:
            top, *rest = module.split(".")
            if top == "actstore":
                yield node.lineno, rest[0] if rest and rest[0] in members else "__init__"


def violations(root: Path) -> list[str]:
    """What the files under `root`, a package called actstore, do that the floors forbid."""
    found = []
    members = set(PLACES) | {path.stem for path in root.iterdir() if path.suffix == ".py" or path.is_dir()}
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        name = inner.parts[0].removesuffix(".py")
        if name not in PLACES:
            found.append(f"{inner}: {name} stands on no floor; add it to FLOORS")
            continue
        package = ".".join(["actstore", *inner.parts[:-1]])
        for line, target in imported(ast.parse(path.read_text()), package, members):
            (floor, room), (below, other) = PLACES[name], PLACES.get(target, (len(FLOORS), set()))
            if target == name or room is other or below < floor or (name, target) in SIDEWAYS:
                continue
            way = "sideways" if below == floor else "upward"
            found.append(f"{inner}:{line}: {name} (floor {floor}) imports {target} (floor {below}): {way}")
    return found


def test_every_import_goes_down():
    assert violations(PACKAGE) == []


def test_a_part_stands_in_one_room():
    assert len(PLACES) == sum(len(room) for rooms in FLOORS for room in rooms)


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("tiers/host.py", "from actstore.store import Store", "upward"),
        ("tiers/host.py", "import actstore.store as s", "upward"),
        ("tiers/host.py", "from actstore import store", "upward"),
        ("tiers/host.py", "from actstore import ActivationStore", "upward"),
        ("tiers/host.py", "import actstore", "upward"),
        ("tiers/host.py", "from ..store import Store", "upward"),
        ("tiers/host.py", "from .. import store", "upward"),
        ("tiers/host.py", "def f():\n    from actstore.hooks import pack", "upward"),
        ("tiers/host.py", "if TYPE_CHECKING:\n    from actstore.session import ActivationStore", "upward"),
        ("tiers/host.py", "from actstore.unheard import x", "upward"),
        ("tiers/host.py", "from actstore.codecs import Raw", "sideways"),
        ("kernels/build.py", "from actstore.codecs.base import Codec", "sideways"),
        ("codecs/base.py", "from actstore.policy import Keep", "sideways"),
        ("trace/event.py", "from actstore.ledger import Ledger", "sideways"),
        ("devices/cpu.py", "from actstore.tiers import Slot", "upward"),
        ("plan/solve.py", "from actstore.transfer import Engine", "sideways"),
        ("integrations/lightning.py", "from actstore.bench import timing", "sideways"),
        ("__init__.py", "from actstore.bench.cli import main", "upward"),
        ("helpers.py", "", "stands on no floor"),
        ("helpers/a.py", "", "stands on no floor"),
        ("codecs/int8.py", "from actstore.kernels import launch", None),
        ("policy/rules.py", "from actstore.codecs import registry", None),
        ("tiers/host.py", "from actstore.tiers.base import Tier", None),
        ("tiers/host.py", "from .base import Tier", None),
        ("tiers/host.py", "from . import base", None),
        ("tiers/host.py", "import torch, os.path\nfrom actstore.errors import TransferError", None),
        ("spec.py", "from actstore.errors import SpecError", None),
        ("tiers/host.py", "from actstore.devices import Device", None),
        ("hooks.py", "from actstore.protect import protected\nfrom actstore.store import Store", None),
        ("__init__.py", "from actstore.session import ActivationStore", None),
        ("bench/compare.py", "from actstore import ActivationStore", None),
    ],
)
def test_a_planted_import_is_judged(tmp_path, path, source, found):
    file = tmp_path / "actstore" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    result = violations(tmp_path / "actstore")
    assert len(result) == (found is not None)
    if found:
        assert result[0].startswith(path)
        assert found in result[0]
