"""The page of a machine, made of whatever figures there are."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from actstore.bench.result import Result
from benchmarks import machine
from benchmarks.suite import page
from tests.bench.figures import ENVIRONMENT, MADE_UP


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "some-2-cores"
    found.mkdir()
    return found


@pytest.mark.parametrize(
    ("processor", "cores", "name"),
    [
        ("Intel(R) Xeon(R) Processor", 2, "intel-xeon-2-cores"),
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", 16, "intel-xeon-platinum-8480c-16-cores"),
        ("AMD EPYC 7B13 64-Core Processor", 8, "amd-epyc-7b13-8-cores"),
        ("", 1, "1-cores"),
    ],
)
def test_a_machine_has_a_name_for_files(processor: str, cores: int, name: str) -> None:
    assert machine.name_of({"processor": processor, "cores": cores}) == name


def test_nothing_measured_is_a_page_of_its_own(folder: Path) -> None:
    assert page.write(folder).read_text().startswith("# some-2-cores\n")


def test_each_file_has_its_section_and_its_picture(folder: Path, result: Result) -> None:
    result.environment = ENVIRONMENT
    for name, found in {**MADE_UP, "gpt": result.to_dict()}.items():
        machine.write(folder / f"{name}.json", found)
    went = {"time": "2026-01-02T03:04:05", "seconds": 90, "error": "interrupted"}
    machine.write(folder / "parts.json", {"gpt": went})
    (folder / "codecs.json").write_text("{}")
    text = page.write(folder).read_text()
    for words in (
        "## gpt: a small GPT on English text", "| int8 | 660 | 1.10 | 200.0 | 52.0 | 26.0 | 600.0 | 3.0000 | 2.00 % |",
        "- raw @ disk failed: OSError: the disk is full",
        "- bitsandbytes 8-bit is left out: bitsandbytes is not installed",
        "**Not finished**: interrupted. 2026-01-02, 1.5 minutes.", "## Where the time goes", "## Training for longer",
        "| int8 | 207, 29.6 times plain |", "[json](some-2-cores/codecs.json)", "| torch | 2 |",
    ):  # fmt: skip
        assert words in text, words
    for name in (*MADE_UP, "gpt"):
        assert f"(some-2-cores/{name}.png)" in text
        assert (folder / f"{name}.png").stat().st_size > 5000


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    machine.write(tmp_path / "a.json", {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        machine.write(tmp_path / "a.json", {"a": float("nan")})
    with pytest.raises(TypeError):
        machine.write(tmp_path / "a.json", {"a": object()})
    assert machine.read(tmp_path / "a.json") == {"a": 1}
    assert machine.read(tmp_path / "b.json") is None


def test_the_pages_here_are_those_of_their_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was made of other figures, or written by hand, would differ. Other tests draw the pictures."""
    monkeypatch.setattr(page.plot, "save", lambda *_: None)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_: None)
    for folder in (path for path in machine.RESULTS.iterdir() if path.is_dir()):
        copy = tmp_path / folder.name
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        assert page.write(copy).read_text() == folder.with_name(f"{folder.name}.md").read_text()
        for file in folder.glob("*.json"):
            assert "NaN" not in file.read_text()
