"""The test files of each module. ``python -m tests.system.places [ROOM ...]`` prints them.

The tests of ``actstore/ROOM/MODULE.py`` are in ``tests/ROOM/test_MODULE.py``, or in a file whose name begins so; those
of a kernel are in the file of its codec. A module without such a file is tested where tests import it, in its own room
first, or through the modules that import it.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

from tests.system.floors import PACKAGE, imports_of, modules_of, room_of

TESTS = PACKAGE.parent / "tests"
ROOMS = {"kernels": ("kernels", "codecs")}  # rooms whose tests are also elsewhere
MOST = 3  # files of a module that has none of its own


def own_files(module: str, files: list[Path], tests: Path = TESTS) -> list[Path]:
    """Return the files that a module's name leads to."""
    room, name = room_of(module), module.rpartition(".")[2]
    folders = [tests / each for each in ROOMS.get(room, (room,))]
    return [
        path
        for path in files
        if any(folder in path.parents for folder in folders)
        and (path.stem == f"test_{name}" or path.stem.startswith(f"test_{name}_"))
    ]


def importers(files: list[Path], modules: set[str]) -> dict[str, list[Path]]:
    """Return the test files that import each module, or a name in it."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in files:
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        for name in sorted(names & modules):
            found[name].append(path)
    return found


def places(package: Path = PACKAGE, tests: Path = TESTS) -> dict[str, list[Path]]:
    """Return the test files of each module of the package, packages themselves left out."""
    paths, files = modules_of(package), sorted(tests.rglob("test_*.py"))
    modules = {name for name, path in paths.items() if path.name != "__init__.py"}
    direct = importers(files, set(paths))
    users: dict[str, set[str]] = defaultdict(set)
    for module, _, target in imports_of(package):
        users[target].add(module)

    def near(module: str) -> list[Path]:
        seen, front = {module}, [module]
        while front:
            found = {path for each in front for path in [*own_files(each, files, tests), *direct[each]]}
            if found:
                room = tests / room_of(module)
                return sorted(found, key=lambda path: (room not in path.parents, path))[:MOST]
            front = sorted({user for each in front for user in users[each]} - seen)
            seen |= set(front)
        return []

    return {module: own_files(module, files, tests) or near(module) for module in sorted(modules)}


def main(rooms: list[str]) -> None:
    """Print the test files of each module, of some rooms or of all."""
    for module, files in places().items():
        if not rooms or room_of(module) in rooms:
            print(f"{module.removeprefix('actstore.'):44} {' '.join(str(p.relative_to(TESTS)) for p in files) or '-'}")


if __name__ == "__main__":
    main(sys.argv[1:])
