"""HTML of objects in notebooks, in light and in dark themes, without any other resource."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# Gray with transparency serves on white and on black; notebooks that drop <style> show plain tables.
STYLE = (
    "<style>"
    ".actstore table{border-collapse:collapse;margin:.4em 0;font-variant-numeric:tabular-nums}"
    ".actstore th,.actstore td{padding:.15em .8em;text-align:left;white-space:nowrap;background:none}"
    ".actstore th{border-bottom:1px solid rgba(128,128,128,.7)}"
    ".actstore td{border-bottom:1px solid rgba(128,128,128,.25)}"
    ".actstore td.words{white-space:normal;max-width:36em}"
    ".actstore .number{text-align:right}"
    ".actstore .bar{background-image:linear-gradient(90deg,rgba(64,144,208,.4),rgba(64,144,208,.4));"
    "background-repeat:no-repeat}"
    ".actstore tr.total{font-weight:bold}"
    ".actstore p,.actstore ul{margin:.3em 0;max-width:60em}"
    "</style>"
)


def section(title: str, *parts: str) -> str:
    """Return a heading and the parts that `table`, `line` and `items` made; empty parts are left out."""
    return f'<div class="actstore">{STYLE}<p><b>{escape(title)}</b></p>{"".join(parts)}</div>'


def line(text: str) -> str:
    """Return a paragraph, or nothing for an empty text."""
    return f"<p>{escape(text)}</p>" if text else ""


def items(texts: Iterable[str]) -> str:
    """Return a list, such as of advice, or nothing for no texts."""
    listed = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{listed}</ul>" if listed else ""


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Sequence[int] = (0,),
    bars: Sequence[float] = (),
    bar: int = -1,
    total: bool = False,
) -> str:
    """Return a table, with all text escaped.

    Parameters
    ----------
    words : columns of words, aligned left; the remaining columns are numbers, aligned right
    bars : a part from 0 to 1 for each row, drawn behind the text of column `bar`
    total : whether the last row is the sum of the rows above it
    """
    rows = list(rows)
    lines = [_row("th", head, words)]
    for at, cells in enumerate(rows):
        style = ' class="total"' if total and at == len(rows) - 1 else ""
        part = bars[at] if at < len(bars) else 0.0
        lines.append(_row("td", cells, words, style, bar, part))
    return f"<table><thead>{lines[0]}</thead><tbody>{''.join(lines[1:])}</tbody></table>"


def _row(
    tag: str, cells: Sequence[str], words: Sequence[int], style: str = "", bar: int = -1, part: float = 0.0
) -> str:
    found = []
    for column, text in enumerate(cells):
        names = ["words" if column in words else "number"]
        width = ""
        if column == bar and part > 0:
            names.append("bar")
            width = f' style="background-size:{100 * min(part, 1.0):.1f}% 100%"'
        kind = " ".join(names)
        found.append(f'<{tag} class="{kind}"{width}>{escape(text)}</{tag}>')
    return f"<tr{style}>{''.join(found)}</tr>"
