"""``actstore fit``, as a user meets it."""

import json
import math
import re
import sys

import pytest

from actstore.cli import app as cli
from actstore.cli import steps as command

SCRIPT = """
import sys
import torch
from torch import nn


def make_step(batch=1024):
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, int(sys.argv[1])))
    x = torch.randn(batch, 512)
    return model, lambda: model(x).square().mean()

"""


def run(monkeypatch, tmp_path, *arguments):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    target, *options = arguments
    monkeypatch.setattr(sys, "argv", ["actstore", "fit", f"{script}:{target}", *options])
    cli.main()


def test_fit_prints_the_table_and_writes_json(monkeypatch, tmp_path, capsys):
    out = tmp_path / "fit.json"
    policies = ["--policy", "int8", "--policy", "recompute"]
    with pytest.raises(SystemExit) as end:
        run(
            monkeypatch,
            tmp_path,
            "make_step",
            "512",
            *policies,
            "--memory",
            "80MiB",
            "--batch",
            "64",
            "--json",
            str(out),
        )
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["policy", "plain", "int8", "recompute", "fits:"]
    values = json.loads(out.read_text())
    assert values["sizes"] == {"batch": 64}
    assert values["largest"]["plain"]["batch"] > 64
    assert [row["at_peak"]["weights"] for row in values["rows"]] == 3 * [4 * (2 * 512 * 2048 + 2048 + 512)]


def test_fit_finds_the_largest_size_of_all(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, tmp_path, "make_step", "512", "--policy", "int8", "--memory", "80MiB", "--batch", "auto")
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"largest batch: \d{4}, under 'plain'; a step needs 80.0 MiB, most of it at \w+Backward0 in 2", text
    )
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, tmp_path, "make_step", "512", "--policy", "int8", "--memory", "80MiB", "--batch", "many")
    assert end.value.code == 2
    assert """batch='many': must be a whole number, or "auto". Write batch=1024.""" in capsys.readouterr().err


def test_fit_without_an_optimizer(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, tmp_path, "make_step", "512", "--policy", "keep", "--no-optimizer")
    assert end.value.code == 0
    assert "optimizer" not in capsys.readouterr().out


def test_fit_has_a_row_for_a_plan(monkeypatch, tmp_path, capsys):
    out = tmp_path / "fit.json"
    policies = ["--policy", "auto", "--policy", "auto(1GiB)"]
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, tmp_path, "make_step", "512", *policies, "--memory", "80MiB", "--json", str(out))
    assert end.value.code == 0
    assert "auto(1GiB): plan for 1.0 GiB of activations: * : keep" in capsys.readouterr().out
    assert [row["policy"] for row in json.loads(out.read_text())["rows"]] == ["plain", "auto", "auto(1GiB)"]


def test_fit_refuses_a_policy_that_chooses_by_values(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, tmp_path, "make_step", "512", "--policy", "bits(0.1)")
    assert end.value.code == 2
    assert "actstore: policy='bits(0.1)': chooses by the errors of payloads" in capsys.readouterr().err


@pytest.mark.parametrize("silent_s", [-1.0, math.inf])
def test_fit_says_how_far_it_is_when_it_takes_long(silent_s, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "SILENT_S", silent_s)
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, tmp_path, "make_step", "512", "--policy", "keep", "--memory", "80MiB")
    assert end.value.code == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if " of 4: " in line]
    begins = ["1 of 4: plain: ", "2 of 4: keep: ", "3 of 4: plain: largest batch ", "4 of 4: keep: largest batch "]
    assert len(lines) == (0 if silent_s > 0 else 4)
    assert all(line.startswith(f"actstore: {begin}") for line, begin in zip(lines, begins, strict=False))


def test_fit_of_one_of_several_ranks(monkeypatch, tmp_path, capsys):
    out = tmp_path / "fit.json"
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, tmp_path, "make_step", "512", "--policy", "keep", "--fsdp", "4", "--json", str(out))
    assert end.value.code == 0
    values = json.loads(out.read_text())
    assert (values["fsdp"], values["tp"]) == (4, 1)
    assert [row["at_peak"]["weights"] for row in values["rows"]] == 2 * [2 * 512 * 2048 + 2048 + 512]
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, tmp_path, "make_step", "512", "--tp", "2")
    assert end.value.code == 2
    assert "actstore: tp=2: 0 must have pairs of linear layers" in capsys.readouterr().err
