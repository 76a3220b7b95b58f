"""README and docs with the figures of results/: ``python -m benchmarks.figures.pages`` writes them.

A line ``<!-- figures: gpt -->`` before a table names it, for `tables`. `SENTENCES` has the sentences with figures.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.figures.sentences import SENTENCES, value
from benchmarks.figures.tables import COLUMNS, TABLES, name_of, runs
from benchmarks.markdown import line, table

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"^(<!-- figures: (.+) -->\n)((?:\|.*\n?)+)", re.MULTILINE)
FIELD = re.compile(r"\{([^{}]+)\}")
NUMBER = r"([-+]?\d[\d,]*(?:\.\d+)?)"


def pages() -> list[str]:
    """Return the names of README and of the pages of docs."""
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


def written(page: str, text: str) -> str:
    """Return the text of a page with the figures of the files."""
    text = MARKED.sub(lambda found: found[1] + _table(page, found[2], found[3]), text)
    for sentence in SENTENCES.get(page, ()):
        text = _sentence(page, sentence, text)
    return text


def _table(page: str, name: str, old: str) -> str:
    if name in TABLES:
        first, _, *rest = table(*TABLES[name]())
        return "\n".join([first, old.splitlines()[1], *rest]) + "\n"  # the page aligns the columns
    lines = old.splitlines()
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    return "\n".join([*lines[:2], *(_filled(page, name, header, each) for each in lines[2:])]) + "\n"


def _filled(page: str, name: str, header: list[str], old: str) -> str:
    cells = [cell.strip() for cell in old.strip().removeprefix("|").removesuffix("|").split("|")]
    if not any(cells[1:]) and cells[0].startswith("**"):  # a heading among the rows
        return old
    row = runs(name).get(name_of(cells[0]))
    if row is None:
        raise SystemExit(f"{page}: {cells[0]}: unknown row of {name}. It has {', '.join(runs(name))}.")
    return line(
        [COLUMNS[column](row) if column in COLUMNS else cell for column, cell in zip(header, cells, strict=True)]
    )


def _sentence(page: str, sentence: str, text: str) -> str:
    """Write the figures of a sentence that the page must have once, in whatever lines."""
    words, fields = FIELD.split(sentence)[::2], FIELD.findall(sentence)
    spaced = (r"\s+".join(map(re.escape, re.split(r" +", part))) for part in words)
    pattern = re.compile(NUMBER.join(spaced))
    found = pattern.findall(text)
    if len(found) != 1:
        raise SystemExit(f"{page} must have this sentence once, and has it {len(found)} times: {sentence}")
    values = [value(field) for field in fields]

    def put(match: re.Match[str]) -> str:
        parts, end = [], match.start()
        for number, new in enumerate(values, 1):
            parts += [text[end : match.start(number)], new]
            end = match.end(number)
        return "".join([*parts, text[end : match.end()]])

    return pattern.sub(put, text)


def main() -> None:
    """Write the pages that differ."""
    for page in pages():
        path = ROOT / page
        old = path.read_text(encoding="utf-8")
        if (new := written(page, old)) != old:
            path.write_text(new, encoding="utf-8")
            print(page)


if __name__ == "__main__":
    main()
