"""The grammar of policies in the docs: that of the parser's module, with the words that the parser knows."""

import re
from pathlib import Path

from actstore.policy import grammar
from actstore.policy.aliases import ALIASES
from actstore.policy.decision import TIERS
from actstore.policy.operators import CLASSES

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "policies.md"


def words(name: str) -> set[str]:
    """Return the quoted words of one rule of the grammar."""
    line = re.search(rf"^{name} +:= (.*)$", grammar.__doc__, re.MULTILINE)
    assert line is not None
    return set(re.findall(r'"([\w.]+)"', line[1]))


def test_the_page_has_the_grammar_of_the_parser():
    block = re.search(r"```text\n(policy    :=.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    assert grammar.__doc__.endswith(block[1])


def test_the_grammar_has_the_words_of_the_parser():
    assert words("tier") == set(TIERS)
    assert words("alias") == {alias.removeprefix("@") for alias in ALIASES}
    assert words("operator") == {*CLASSES, "aten."}
