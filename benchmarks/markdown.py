"""Tables in Markdown."""

from __future__ import annotations


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table; all columns but the first are right-aligned."""
    rule = "|" + "|".join(["---", *(["---:"] * (len(header) - 1))]) + "|"
    return [line(header), rule, *(line(row) for row in rows)]


def line(cells: list[str]) -> str:
    """Return one row."""
    return "| " + " | ".join(cell(text) for text in cells) + " |"


def cell(text: str) -> str:
    """Escape text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
