"""Lines and tables of plain text, and values that JSON can hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import isfinite
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 118
TABLE_WIDTH = 100  # columns of tables when stdout is not a terminal
UNIT = re.compile(r"(?<=\d) (?=%|ms|B|[KMGT]iB)")  # the space before a unit


def percent(fraction: float, form: str = ".1f") -> str:
    return f"{100 * fraction:{form}} %"


def short(value: object) -> str:
    """Return the `repr` of a value, at most 40 characters of it."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def finite(value: Any, *, as_text: bool = False) -> Any:
    """Return dicts and lists of values for JSON, which has no NaN and no infinity: they become None, or text."""
    if isinstance(value, dict):
        return {name: finite(inner, as_text=as_text) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner, as_text=as_text) for inner in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value) if as_text else None
    return value


def say(what: RenderableType) -> None:
    """Print what rich renders, in `TABLE_WIDTH` columns where stdout is not a terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    console.print(what)


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return lines of at most WIDTH characters that keep a number and its unit together.

    Lines after the first have twice the indent.
    """
    whole = UNIT.sub("\N{NO-BREAK SPACE}", text)
    lines = wrap(whole, WIDTH, initial_indent=indent, subsequent_indent=2 * indent, break_long_words=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def unwrapped(lines: Iterable[str]) -> list[str]:
    """Return the texts that `wrapped` broke into lines with an indent."""
    found: list[str] = []
    for line in lines:
        if found and line.startswith("    "):
            found[-1] += " " + line.strip()
        else:
            found.append(line.strip())
    return found


def columns(cells: Sequence[Sequence[str]], numbers: bool = False, left: int | None = None) -> list[str]:
    """Return the lines of a table.

    The last column is aligned left, and so is the first one unless it has `numbers`; the rest are aligned right. With
    `left`, the columns from that one on are aligned left, and all before it right.
    """
    last = len(cells[0]) - 1
    words = set(range(left, last)) if left is not None else set() if numbers else {0}
    widths = [max(len(line[i]) for line in cells) for i in range(last)]
    return [
        "  ".join([
            *(cell.ljust(width) if i in words else cell.rjust(width)
              for i, (cell, width) in enumerate(zip(line[:last], widths, strict=True))),
            line[last],
        ]).rstrip()
        for line in cells
    ]  # fmt: skip
