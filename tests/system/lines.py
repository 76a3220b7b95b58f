"""Lines of the package by room: ``python -m tests.system.lines``.

A line counts once: as docstring, as comment of its own, as blank, or as code. Code is imports, signatures of functions
with their decorators, and all the rest, bodies.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "actstore"
KINDS = ("modules", "lines", "code", "bodies", "signatures", "imports", "docstrings", "comments", "blank")
Functions = ast.FunctionDef | ast.AsyncFunctionDef


def count(source: str) -> Counter[str]:
    """Return the number of lines of each kind in a module."""
    tree, text = ast.parse(source), source.splitlines()
    kinds = ["blank" if not line.strip() else "comments" if line.lstrip().startswith("#") else "code" for line in text]

    def mark(kind: str, first: int, last: int) -> None:
        for number in range(first - 1, last):
            if kind == "docstrings" or kinds[number] == "code":
                kinds[number] = kind

    nodes = [*ast.walk(tree)]
    for node in nodes:
        if isinstance(node, Functions | ast.ClassDef | ast.Module) and ast.get_docstring(node, clean=False) is not None:
            mark("docstrings", node.body[0].lineno, node.body[0].end_lineno)
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            mark("imports", node.lineno, node.end_lineno)
        elif isinstance(node, Functions):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            mark("signatures", first, max(node.lineno, node.body[0].lineno - 1))
    found = Counter(kinds)
    found["bodies"] = found["code"]
    found["code"] += found["signatures"] + found["imports"]
    found["lines"] = len(text)
    return found


def rooms(package: Path = PACKAGE) -> dict[str, Counter[str]]:
    """Return the numbers of each room of the package, and of all."""
    found = defaultdict[str, Counter[str]](Counter)
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        numbers = count(path.read_text(encoding="utf-8"))
        numbers["modules"] = path.name != "__init__.py"
        for room in (parts[0] if len(parts) > 1 else "(loose)", "all"):
            found[room] += numbers
    return found


def main() -> None:
    found = rooms()
    sys.stdout.write(f"{'room':13}" + "".join(f"{kind:>11}" for kind in KINDS) + "\n")
    for room, numbers in sorted(found.items(), key=lambda item: item[1]["lines"]):
        sys.stdout.write(f"{room:13}" + "".join(f"{numbers[kind]:11,}" for kind in KINDS) + "\n")


if __name__ == "__main__":
    main()
