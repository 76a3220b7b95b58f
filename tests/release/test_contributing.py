"""CONTRIBUTING.md says what is true."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize(
    "path", sorted({path for path in re.findall(r"[`(]([\w./]+/[\w./]*\w+)[`)]", TEXT) if "NAME" not in path})
)
def test_what_it_names_exists(path):
    assert any((ROOT / start / path).exists() for start in ("", "actstore"))


def test_every_target_of_make_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", TEXT)) <= targets


def test_the_entry_points_are_those_of_the_example():
    example = (ROOT / "tests/release/example_codec/pyproject.toml").read_text()
    assert re.search(r"```toml\n(.*?)```", TEXT, re.DOTALL)[1].strip() in example
