"""CONTRIBUTING.md says what is true."""

import re
from pathlib import Path

import pytest

from tests.system.test_floors import FLOORS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
WORDS = {
    "_version": "ground: what needs nothing",
    "devices": "compute devices: streams, memory, copies",
    "kernels": "one room each: kernels, codecs, tiers, policies, traces, accounts",
    "transfer": "what moves payloads, and what plans",
    "store": "the store of payloads",
    "hooks": "what autograd, modules and recomputation hand to it",
    "session": "what users hold",
    "check": "what runs whole steps",
    "__init__": "the public names",
    "integrations": "what uses them as any user does",
}


def floor_plan() -> str:
    """The table, from the top floor down."""
    rows = []
    for number, floor in reversed(list(enumerate(FLOORS))):
        members = {member for room in floor for member in room}
        [word] = [text for name, text in WORDS.items() if name in members]
        rooms = " · ".join(", ".join(f"`{name}`" for name in sorted(room)) for room in floor)
        rows.append(f"| {number} | {word} | {rooms} |")
    return "\n".join(["| floor | | rooms |", "|---|---|---|", *rows, ""])


def test_the_floor_plan_is_that_of_the_test():
    found = re.search(r"<!-- floors: .*?-->\n(.*?)<!-- end of floors -->", TEXT, re.DOTALL)[1]
    assert found.strip() == floor_plan().strip(), f"put this table into CONTRIBUTING.md:\n{floor_plan()}"


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
