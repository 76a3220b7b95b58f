"""The benchmark of codecs, on small tensors."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from rich.console import Console
from typer.testing import CliRunner

from actstore.bench.codecs import command, contenders, plot, table
from actstore.bench.codecs.command import Setting
from actstore.bench.codecs.contenders import BNB, DEFAULT, Contender
from actstore.bench.codecs.result import CodecResult, CodecRow, Speed
from actstore.bench.plot import spread
from actstore.cli import commands
from actstore.codecs import Int8, names
from actstore.errors import ConfigError, KernelUnavailable

SMALL = Setting(size_mb=0.1, error_rows=8, repeats=3)


@pytest.fixture(scope="module")
def result() -> CodecResult:
    found = command.run(SMALL, ["raw", "int8", "zmask", "bit1"])
    found.rows.append(CodecRow("zstd", "byte codecs", failed="blosc2 is not installed", missing=True))
    found.rows.append(CodecRow("int4", "blocks", failed="RuntimeError: broken"))
    return found


def test_rows(result: CodecResult) -> None:
    found = {(row.codec, row.dtype): row for row in result.good}
    assert list(found) == [
        *((codec, dtype) for codec in ("raw", "int8", "zmask") for dtype in SMALL.dtypes),
        ("bit1", "bool"),
    ]
    for (codec, _), row in found.items():
        assert row.encode is not None
        assert row.decode is not None
        assert len(row.encode.ms) == len(row.encode.copy_ms) == len(row.decode.ms) == SMALL.repeats
        assert row.lossless == (codec != "int8")
        assert list(row.error) == ([] if codec == "bit1" else list(command.ERROR_DATA))
        assert not row.lossless or not any(row.error.values())
    assert found["int8", "float32"].error["gaussian"] == pytest.approx(0.0065, rel=0.1)
    assert found["int8", "bfloat16"].bits == pytest.approx(8.125, rel=1e-3)
    assert found["bit1", "bool"].ratio == pytest.approx(8, rel=1e-3)
    assert (found["zmask", "float32"].data, found["zmask", "float32"].fixed) == ("relu", False)
    assert found["zmask", "float32"].ratio_by_data["relu"] > 1.7
    assert found["zmask", "float32"].ratio_by_data["gaussian"] < 1


def test_bitsandbytes_is_called_directly() -> None:
    pytest.importorskip("bitsandbytes")
    (row,) = command.run(Setting(0.1, 8, 3, dtypes=("float32",)), [BNB]).rows
    assert not row.failed
    assert (row.family, row.bits) == (contenders.PEER, pytest.approx(8.125, rel=1e-2))
    assert 0.005 < (row.error["gaussian"] or 0) < 0.02


def test_every_codec_is_there_by_default() -> None:
    found, missing = contenders.select([])
    assert {contender.codec.name for contender in found if contender.codec} == set(names()) - {"bnb8"}
    assert BNB in DEFAULT
    assert not missing


@pytest.mark.parametrize("text", ["int8 @ host", "keep", "int9", "int8(group=3)", ""])
def test_what_is_no_codec_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        contenders.select([text])


def test_a_setting_is_checked() -> None:
    for change, words in (({"size_mb": 0}, "--size"), ({"repeats": 2}, "--repeats"), ({"dtypes": ("f",)}, "--dtype")):
        with pytest.raises(ConfigError, match=words):
            Setting(**change)  # type: ignore[arg-type]


def test_each_call_stands_beside_a_copy() -> None:
    speed = Speed([2.0, 4.0, 1.0], [1.0, 1.0, 1.0])
    assert speed.of_copy == [0.5, 0.25, 1.0]
    assert speed.quartiles == (0.375, 0.5, 0.75)
    assert Speed([2.0], [1.0]).quartiles == (0.5, 0.5, 0.5)
    assert speed.gbps(4 * 10**6) == 2.0


def test_repeats_end_with_the_time() -> None:
    source = torch.ones(1000)
    trip = Contender("int8", Int8()).trip(source)
    encode, decode = command.time_trip(trip, source, 1000, 0.0)
    assert len(encode.ms) == len(decode.ms) == command.MIN_REPEATS


@pytest.mark.parametrize(
    ("error", "missing", "words"),
    [
        (KernelUnavailable("x is not installed; pip install x"), True, "x is not installed; pip install x"),
        (RuntimeError("broken\nin two lines"), False, "RuntimeError: broken"),
    ],
)
def test_a_codec_that_cannot_run_says_why(
    monkeypatch: pytest.MonkeyPatch, error: Exception, missing: bool, words: str
) -> None:
    def trip(self: Contender, source: torch.Tensor) -> None:
        raise error

    monkeypatch.setattr(Contender, "trip", trip)
    rows = command.run(SMALL, ["int8", "raw"]).rows
    assert [(row.codec, row.failed, row.missing) for row in rows[::2]] == [
        ("int8", words, missing),
        ("raw", words, missing),
    ]
    done = CliRunner().invoke(commands.app, ["bench", "codecs", "int8"])
    assert done.exit_code == (0 if missing else 1)
    assert words in done.output


def test_json_comes_back(result: CodecResult) -> None:
    text = result.to_json()
    assert CodecResult.from_json(text) == result
    row = json.loads(text)["rows"][2]
    assert row["codec"] == "int8"
    assert row["ratio"] == pytest.approx(3.94, rel=1e-2)
    assert row["encode"]["of_copy"] > 0
    assert row["encode"]["gbps"] > 0


def test_the_tables_show_everything_in_100_columns(result: CodecResult) -> None:
    console = Console(width=100, file=StringIO(), color_system=None)
    console.print(table.render(result))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    for words in ("int8", "bit1", "softmax", "zstd: blosc2 is not installed", "int4: RuntimeError: broken"):
        assert words in text


def test_a_picture(result: CodecResult, tmp_path: Path) -> None:
    for rows in (result.rows, result.failed):
        path = tmp_path / f"{len(rows)}.png"
        plot.save(CodecResult(result.environment, result.setting, rows), path)
        assert path.stat().st_size > 5000


def test_marks_of_one_size_stand_side_by_side() -> None:
    found = plot.side_by_side([8.125, 3.0, 8.125, 16.0, 8.13])
    assert found[1] == 3.0
    assert found[3] == 16.0
    assert found[0] < found[2] < found[4]
    assert found[2] == pytest.approx(8.125)


def test_names_are_spread() -> None:
    assert spread([10.0, 12.0, 50.0], 10, 0, 100) == [6.0, 16.0, 50.0]
    assert spread([95.0, 96.0], 10, 0, 100) == [90.0, 100.0]
    assert spread([1.0, 2.0], 10, 0, 100) == [0.0, 10.0]
    assert spread([], 10, 0, 100) == []


def test_the_command(tmp_path: Path) -> None:
    files = {ending: tmp_path / f"out.{ending}" for ending in ("json", "png")}
    flags = ["--size", "0.1", "--error-rows", "8", "--repeats", "3", "--dtype", "bfloat16"]
    done = CliRunner().invoke(
        commands.app, ["bench", "codecs", "int8", *flags, "--json", str(files["json"]), "--plot", str(files["png"])]
    )
    assert done.exit_code == 0, done.output
    assert [row["codec"] for row in json.loads(files["json"].read_text())["rows"]] == ["int8"]
    assert files["png"].stat().st_size > 5000
    assert "int8" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--layers", "2", "codecs"], "--layers does nothing before 'codecs'"),
        (["bench", "codecs", "int9"], "int9"),
        (["bench", "codecs", "--plot", "x.xyz"], "ends in .png, .svg or .pdf"),
        (["bench", "codecs", "--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json"),
    ],
)
def test_bad_input_is_said(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(commands.app, arguments)
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
