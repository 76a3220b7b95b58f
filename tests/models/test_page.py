"""The page about models: made from the result of a sweep, in which no exact policy changed a bit."""

import pytest

from tests.models import page, sweep

FOUND = sweep.read(page.RESULTS)


def test_the_page_shows_the_result():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written(text, FOUND) == text, "run python -m tests.models.page"


def test_no_exact_policy_changes_a_bit_and_no_lossy_one_gives_nan():
    wrong = [
        (name, kind, policy, what)
        for name, each in FOUND.items()
        for kind, policy, what in sweep.outcomes(each)
        if isinstance(what, str) and what.startswith(("DIFFERS", "NAN"))
    ]
    assert not wrong
    assert not [name for name, each in FOUND.items() if "failed" in each]
    assert sum("float32" in each for each in FOUND.values()) >= 250


def test_what_differs_or_is_refused_is_counted():
    good = {"recompute": [0.2, 0.0], "int8": [0.3, 0.01]}
    bad = {"recompute": "DIFFERS by 0.1", "int8": "NAN"}
    refused = {"recompute": "refused: 'a.0': no reason for 3 bytes", "int8": [0.3, 0.2]}
    pairs = (("a/X", good), ("a/Y", bad), ("b/Z", refused))
    found = {name: {"float32": each, "autocast": 0.004} for name, each in pairs}
    text = "\n".join([*page._policies(found), *page._refusals(found), *page._errors(found)])
    assert "| `recompute` | float32 | 1 | 1 | 0 | 1 |" in text
    assert "| '…': no reason for N bytes | `recompute` | Z | 1 |" in text
    assert "| `b/Z` | 20.00% | 0.40% |" in text


@pytest.mark.parametrize("text", ["", "a\n"])
def test_text_above_the_mark_stays(text):
    assert page.written(f"{text}{page.MARK}\nold", FOUND).startswith(f"{text}{page.MARK}\n\n|")
