"""Figures of README and docs: those of the files in results/, which ``python -m benchmarks.figures.pages`` writes."""

from __future__ import annotations

import re

import pytest

from benchmarks.figures import pages, sentences, tables

TABLE = re.compile(r"((?:^|\n)[^\n]*\n)?\n((?:\|[^\n]*\n)+)")
CODE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"[-+~<≤]?\s*\d[\d,. ]*(?: to [\d.,]+)?\s*(?:%|ms|us|µs|MiB|GiB|GB/s|s)?(?: \([^)]*\))?")


@pytest.mark.parametrize("page", pages.pages())
def test_a_page_has_the_figures_of_the_files(page):
    text = (pages.ROOT / page).read_text(encoding="utf-8")
    assert pages.written(page, text) == text, "run python -m benchmarks.figures.pages"


def test_a_figure_that_differs_is_found():
    text = (pages.ROOT / "README.md").read_text(encoding="utf-8")
    row = re.search(r"\| `int8` \| (\d\.\d\d) ", text)
    assert row is not None
    wrong = text[: row.start(1)] + "9.99" + text[row.end(1) :]
    assert pages.written("README.md", wrong) == text


def test_a_figure_of_a_sentence_that_differs_is_found(monkeypatch):
    monkeypatch.setitem(sentences.SENTENCES, "page.md", ("plain takes {gpt|plain|step, ms} ms a step",))
    right = tables.COLUMNS["step, ms"](tables.runs("gpt")["plain"])
    assert pages.written("page.md", "Here plain\ntakes 3 ms a step.") == f"Here plain\ntakes {right} ms a step."
    with pytest.raises(SystemExit, match=r"page\.md must have this sentence once, and has it 0 times"):
        pages.written("page.md", "Nothing.")


def test_an_unknown_row_is_an_error():
    with pytest.raises(SystemExit, match=r"page\.md: `int9`: unknown row of gpt"):
        pages.written("page.md", "<!-- figures: gpt -->\n| row | held |\n|---|---|\n| `int9` | 3 MiB |\n")
