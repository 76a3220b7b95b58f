"""The rules for words: no breach in the package, its sources, docs and benchmarks; and each breach is found."""

import pytest

from tests.release import words


def test_words_follow_the_rules():
    assert list(words.findings()) == []


BREACHES = {
    "rule 1: a docstring": 'def f():\n    """How to add."""\n',
    "rule 1: a function's": 'def f():\n    """The sum of two numbers."""\n',
    "rule 1: a function's docstring": 'def f():\n    """Order of the layers."""\n',
    "rule 2": "x = 1  # somebody else's\n",
    "rule 4": 'raise ValueError(f"{x} is no number")\n',
    "rule 5": f"raise ValueError('{'word ' * 26}.')\n",
    "rule 6: an error": 'raise ValueError(f"size={size}: must be 1 or more")\n',
    "rule 6: a sentence": 'raise ValueError(f"size={size}: must be 1 or more; " "give 2.")\n',
    "rule 3: 'behind'": "x = 1  # read behind the last operator\n",
    "rule 3: 'the most bytes'": 'x = "the bound on the peak, the most bytes"\n',
    "rule 3: 'the begin'": "x = 1  # from the begin of backward\n",
    "rule 3: 'so many'": '"""The first of so many steps."""\n',
    "rule 3: 'what it has'": "x = 1  # puts back what it has written\n",
    "rule 3: 'of which'": "x = 1  # threads of which one runs the job\n",
    "rule 3: 'normalise'": "x = 1  # normalise the rows\n",
    "rule 3: 'behaviour'": "x = 1  # the behaviour of the step\n",
    "rule 7": "x = 1\n# of the rest\n\ny = 2\n",
    "rule 8: Row": "class Row:\n    pass\n",
    "rule 8: several": "class A:\n    pass\n\n\nclass _A:\n    pass\n",
}


@pytest.mark.parametrize("rule", BREACHES)
def test_a_breach_is_found(rule, tmp_path, monkeypatch):
    monkeypatch.setattr(words, "ROOT", tmp_path)
    (tmp_path / "actstore").mkdir()
    (tmp_path / "actstore" / "module.py").write_text(BREACHES[rule])
    assert [each.partition(": ")[2] for each in words.findings() if rule in each]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("# Sums\n\nOne. Two. Three.\n\n| four. Five. Six. Seven. |\n", []),
        ("# Sums\n\n```\nOne. Two. Three. Four.\n\n```\nOne. Two.\nThree. Four.\n", [7]),
        ("One (a. b. c.) and `d. E. F. G.`\nTwo. Three.\n\nOne. Two. Three. [Four](x).\n", [4]),
    ],
)
def test_long_paragraphs_of_pages_are_found(text, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(words, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for page in ("docs/page.md", "README.md"):
        (tmp_path / page).write_text(text)
    found = [each.split(": ")[:2] for each in words.findings()]
    assert found == [[f"{page}:{line}", "rule 9"] for page in ("README.md", "docs/page.md") for line in lines]


GOOD = '''"""Sums."""

import warnings

# -- sums -----------------------------------------


class Sum:
    """Sum of numbers that a backward pass prefetches; the submodule and others are left out."""

    @property
    def half(self):
        """Half of it."""

    def add(self, n):
        """Add `n`."""
        if n < 0:
            raise ValueError(f"n={n}: must be >= 0. Use 'a; b' instead.")
        warnings.warn(f"{n} is kept: {why}", stacklevel=2)
        raise KeyError(n)  # at last: there is no sum, and re-running leaves no file behind

        # of the next line
        return self.submodule
'''


def test_good_words_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(words, "ROOT", tmp_path)
    (tmp_path / "actstore").mkdir()
    (tmp_path / "actstore" / "module.py").write_text(GOOD)
    assert list(words.findings()) == []
