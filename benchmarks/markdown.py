"""Tables in Markdown."""

from __future__ import annotations


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table; all columns but the first stand to the right."""
    rule = "|" + "|".join(["---", *(["---:"] * (len(header) - 1))]) + "|"
    return [line(header), rule, *(line(row) for row in rows)]


def line(cells: list[str]) -> str:
    """One row."""
    return "| " + " | ".join(cell(text) for text in cells) + " |"


def cell(text: str) -> str:
    """Text that a table can hold."""
    return text.replace("|", "\\|").replace("\n", " ")
