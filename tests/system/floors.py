"""The floors of the package, computed from its imports. ``python -m tests.system.floors`` puts them in CONTRIBUTING.md.

A room is a folder of the package with all that is in it, or a loose module; `__main__` belongs to `cli`. A room stands
one floor above the highest room that it imports. Every import counts, inside functions and for type checkers alone too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "actstore"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- floors: made by python -m tests.system.floors -->", "<!-- end of floors -->"
DOORS = {"__main__": "cli"}

Graph = dict[str, set[str]]


class Import(NamedTuple):
    """One import: the importing module, the line, the imported module."""

    module: str
    line: int
    target: str


def modules_of(package: Path) -> dict[str, Path]:
    """Every module by its dotted name; a package by the name of its folder."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(package.rglob("*.py"))
    }


def imports_of(package: Path) -> list[Import]:
    """Every import of a module of the package by another one."""
    modules = modules_of(package)
    found = []
    for name, path in modules.items():
        here = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for line, target in _targets(ast.parse(path.read_text(encoding="utf-8")), here):
            while target and target not in modules:  # a name in a module
                target = target.rpartition(".")[0]
            if target and target != name:
                found.append(Import(name, line, target))
    return found


def _targets(tree: ast.AST, here: str) -> Iterator[tuple[int, str]]:
    """The line and the full dotted name of each import; `here` is the package of the importing module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = here.split(".")
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def room_of(module: str) -> str:
    """The room of a module: ``actstore.codecs.raw`` is in ``codecs``."""
    room = [*module.split("."), "__init__"][1]
    return DOORS.get(room, room)


def rooms_of(package: Path, imports: list[Import]) -> Graph:
    """Each room with the other rooms that it imports."""
    graph: Graph = {room_of(module): set() for module in modules_of(package)}
    for module, _, target in imports:
        if room_of(module) != room_of(target):
            graph[room_of(module)].add(room_of(target))
    return graph


def circles(package: Path, imports: list[Import]) -> list[str]:
    """Rooms, folders of one room, and modules of one folder that import each other in a circle."""
    folders = {m: path.parent.relative_to(package).as_posix() for m, path in modules_of(package).items()}
    graphs: dict[str, Graph] = {"actstore": rooms_of(package, imports)}
    for module, _, target in imports:
        if room_of(module) != room_of(target):
            continue
        here, there = folders[module], folders[target]
        group, a, b = (here, module, target) if here == there else (room_of(module), here, there)
        graphs.setdefault(f"{group} {here == there}", {}).setdefault(a, set()).add(b)
    return [" <- ".join(found) for graph in graphs.values() if (found := _circle_in(graph))]


def _circle_in(graph: Graph) -> list[str]:
    """One circle of a graph, from one of its members back to it; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def floors_of(rooms: Graph) -> dict[str, int]:
    """The floor of each room, from 1."""
    floors: dict[str, int] = {}
    for room in TopologicalSorter(rooms).static_order():
        floors[room] = 1 + max((floors[below] for below in rooms[room]), default=0)
    return floors


def upward(imports: list[Import], floors: dict[str, int]) -> list[str]:
    """The imports of other rooms that do not go to a lower floor."""
    top = len(floors) + 1
    return [
        f"{module}:{line} imports {target}: floor {floors.get(room_of(module), 'unknown')} from {floor}"
        for module, line, target in imports
        if room_of(module) != room_of(target)
        and (floor := floors.get(room_of(target), top)) >= floors.get(room_of(module), 0)
    ]


def table_of(package: Path, floors: dict[str, int]) -> str:
    """The floors from the top down, each room with the first line of its docstring."""
    rows = ["| floor | room | |", "|---|---|---|"]
    for room, floor in sorted(floors.items(), key=lambda item: (-item[1], item[0])):
        path = package / room / "__init__.py" if (package / room).is_dir() else package / f"{room}.py"
        text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
        rows.append(f"| {floor} | `{room}` | {text} |")
    return "\n".join(rows)


def written_table(text: str) -> str:
    """The table in CONTRIBUTING.md."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def written_floors(table: str) -> dict[str, int]:
    """The floor of each room in a table."""
    return {room: int(floor) for floor, room in re.findall(r"^\| (\d+) \| `(\w+)` \|", table, re.MULTILINE)}


def main() -> None:
    table = table_of(PACKAGE, floors_of(rooms_of(PACKAGE, imports_of(PACKAGE))))
    text = CONTRIBUTING.read_text(encoding="utf-8")
    CONTRIBUTING.write_text(text.replace(written_table(text), table), encoding="utf-8")


if __name__ == "__main__":
    main()
