"""Assignments to attributes of another room's objects: ``python -m tests.system.attributes``."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "actstore"
TORCH = frozenset({"args", "backward", "data", "forward", "grad"})  # attributes of tensors, modules and exceptions

# Records that other rooms fill, by design.
EXCEPTIONS = {
    "Account": "the figures of one site: the hooks, the store and the engine each fill theirs, for each tensor",
    "Claim": "who makes one sets all of its attributes before there is memory to lose",
    "Reader": "a prediction asks readers to show what backward is given",
    "Slot": "who copies into a slot of the device says when the bytes are there",
}


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _stores(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def _owners(trees: dict[Path, ast.Module]) -> dict[str, set[tuple[str, str]]]:
    """The rooms and classes that have an attribute, by its name."""
    owners = defaultdict[str, set[tuple[str, str]]](set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            names = {each.attr for each in _stores(node) if ast.unparse(each.value) == "self"}
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    names.add(line.target.id)
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__slots__":
                    names |= set(ast.literal_eval(line.value))
            for name in names:
                owners[name].add((_room(path), node.name))
    return owners


def findings(root: Path = ROOT) -> Iterator[str]:
    """A line for each assignment to an attribute that only classes of other rooms have; not of bench, cli, testing."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))}
    owners = _owners(trees)
    for path, tree in trees.items():
        if _room(path) in ("bench", "cli", "testing"):
            continue
        for node in _stores(tree):
            known = owners.get(node.attr, set())
            if not known or node.attr in TORCH or ast.unparse(node.value) in ("self", "cls", "_thread"):
                continue
            if _room(path) not in {room for room, _ in known} and not {name for _, name in known} & EXCEPTIONS.keys():
                names = ", ".join(sorted(name for _, name in known))
                yield f"{path.relative_to(root.parent)}:{node.lineno}: {ast.unparse(node)} is an attribute of {names}"


if __name__ == "__main__":
    print(*findings(), sep="\n")
