"""The command line, as a user meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actstore import __version__
from actstore.bench import files
from actstore.cli import commands
from actstore.cli.app import main

SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch": 32, "steps": 2, "threads": 1}
TINY = ["bench", *(f"--{name}={value}" for name, value in SIZES.items())]


def run_main(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> int:
    monkeypatch.setattr(sys, "argv", ["actstore", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.mark.promise
def test_trains_shows_and_writes(tmp_path: Path) -> None:
    files = {ending: tmp_path / f"out.{ending}" for ending in ("json", "png")}
    flags = ["--rows", "raw @ disk; mine", "--policy", "mine=recompute(int8)", "--disk-path", str(tmp_path)]
    done = CliRunner().invoke(commands.app, [*TINY, *flags, "--json", str(files["json"]), "--plot", str(files["png"])])
    assert done.exit_code == 0, done.output
    values = json.loads(files["json"].read_text())
    assert [row["name"] for row in values["rows"]] == ["plain", "raw @ disk", "mine"]
    assert all(row["step_ms"] > 0 and row["peak_bytes"] > 0 for row in values["rows"])
    plain, _, mine = values["rows"]
    assert plain["held_bytes"] > plain["saved_bytes"]  # the heap's own bytes, too
    assert mine["stored_bytes"] < mine["held_bytes"] < plain["held_bytes"] / 2
    assert values["rows"][1]["grad_error"] == 0
    assert values["rows"][1]["loss"] == values["rows"][0]["loss"]
    assert values["workload"]["width"] == 32
    assert values["environment"]["torch"]
    assert files["png"].stat().st_size > 5000
    assert "raw @ disk" in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"out.json", "out.png"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--heads", "5"], "--heads 5: must be a divisor of --width 256"),
        (["--device", "tpu9"], "--device 'tpu9': must be cpu"),
        (["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: No such file or directory"),
        (["--plot", "/no/such/folder/x.png"], "--plot /no/such/folder/x.png"),
        (["--plot", "x.xyz"], "ends in .png, .svg or .pdf"),
        (["--disk-path", "/no/such/folder"], "--disk-path /no/such/folder"),
        (["--policy", "mine"], "is not NAME=TEXT"),
        (["--policy", "mine=int9"], "int9"),
        (["--rows", "recomput"], "Near ones: recompute"),
    ],
)
def test_bad_input_is_said_in_a_few_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert run_main(monkeypatch, ["bench", *flags]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("actstore: ")
    assert "Traceback" not in said


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, ["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_a_probe_for_writing_leaves_nothing_and_keeps_what_is_there(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("old")
    files.check_outputs(html=old, json=tmp_path / "new.json")
    assert old.read_text() == "old"
    assert not (tmp_path / "new.json").exists()
