"""Small files and small functions: the limits of the package, without exceptions."""

import ast
from pathlib import Path

import actstore
from tests.system.lines import count

ROOT = Path(actstore.__file__).parent
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60  # without the docstring


def lengths(source):
    """Yield the name of each function, and its lines from `def` on."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            rest = 0 if docstring is None else docstring.end_lineno - docstring.lineno + 1
            yield node.name, node.end_lineno - node.lineno + 1 - rest


def test_files_and_functions_are_small():
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        if (lines := source.count("\n")) > MAX_FILE_LINES:
            found.append(f"{name}: {lines} lines")
        found += [f"{name}: {lines} lines in {f}" for f, lines in lengths(source) if lines > MAX_FUNCTION_LINES]
    assert found == []


SOURCE = '''
def f():
    """One.

    Two.
    """
    return 1


async def g():
    def h():
        return 2

    return h
'''


def test_lines_are_counted_without_the_docstring():
    assert dict(lengths(SOURCE)) == {"f": 2, "g": 5, "h": 2}


def test_lines_are_counted_by_kind():
    source = '''"""Text.

More.
"""
import ast
# a comment
LIMIT = 3  # code


@cache
def f(
    x,
):
    """Text."""
    return x


def g(): return 1
'''
    numbers = {
        "code": 8,
        "bodies": 2,
        "signatures": 5,
        "imports": 1,
        "docstrings": 5,
        "comments": 1,
        "blank": 4,
        "lines": 18,
    }
    found = count(source)
    assert {kind: found[kind] for kind in numbers} == numbers
