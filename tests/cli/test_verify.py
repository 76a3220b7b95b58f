"""``actstore verify``, as a user meets it."""

import json
import sys
from pathlib import Path

import pytest

from actstore.cli import app as cli
from actstore.errors import ConfigError
from actstore.rerun.target import EXAMPLE, load

SCRIPT = """
import asyncio
import sys
import torch
from torch import nn

ARGUMENTS = sys.argv[1:]
BATCHES = torch.Generator()


class Step:
    def __init__(self, model):
        self.model = model

    def __call__(self):
        return self.model(torch.ones(3, 4)).square().sum()


def make_step():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, Step(model)


def make_object():
    return make_step()[1]


def make_random():
    model, _ = make_step()
    return model, lambda: model(torch.randn(3, 4, generator=BATCHES)).sum()


def make_batches():
    model, step = make_step()
    return model, step, [lambda: model(torch.eye(4)).square().sum()]


def make_exiting():
    sys.exit(0)


def make_step_that_exits():
    model, _ = make_step()
    return model, lambda: sys.exit(0)


def make_cancelled():
    model, _ = make_step()

    def step():
        raise asyncio.CancelledError

    return model, step


def make_raising():
    model, _ = make_step()
    return model, lambda: model(torch.zeros(3, 5))


def make_nothing():
    return 3


make_assigned = make_step
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a script; imports and arguments are as before at the end."""
    (tmp_path / "scripted.py").write_text(SCRIPT)
    (tmp_path / "plain_script.py").write_text("raise AssertionError('was run')\n")
    (tmp_path / "unguarded.py").write_text("def make_step(): ...\nprint('trained')\nraise SystemExit\n")
    (tmp_path / "broken_script.py").write_text("import no_such_package_at_all\nmake_step = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["actstore"])
    for name in ("scripted", "plain_script", "unguarded", "broken_script"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)


def run_main(*arguments: str) -> int:
    sys.argv = ["actstore", "verify", *arguments]
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "code", "begins"),
    [
        (["scripted.py"], 0, "Equal"),
        (["scripted.py:make_object", "--policy", "raw @ disk", "--disk-path", "."], 0, "Equal"),
        (["scripted:make_assigned", "--policy", "recompute"], 0, "Equal"),
        (["scripted.py", "--policy", "int8"], 1, "Different"),
        (["scripted.py", "--policy", "int8", "--tolerance", "0.05", "--steps", "1"], 0, "Within tolerance"),
        (["scripted.py:make_random"], 2, "No verdict"),
    ],
)
def test_the_exit_code_is_the_answer(
    arguments: list[str], code: int, begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(*arguments) == code
    said = capsys.readouterr()
    assert said.out.startswith(begins)
    assert not said.err


def test_the_result_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("scripted.py", "--policy", "int8", "--json", "out.json") == 1
    values = json.loads((tmp_path / "out.json").read_text())
    assert values["verdict"] == "different"
    assert values["first"]["module"] == "2"
    assert [row["name"] for row in values["parameters"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert values["parameters"][2]["relative_error"] > 0
    assert values["stored_bytes"] > 0
    assert "'2'" in capsys.readouterr().out


def test_lossy_measures_bias_and_variance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lossy = ("--lossy", "--policy", "unprotected int4(round=dither)", "--draws", "3")
    assert run_main("scripted.py", *lossy, "--each-site", "--json", "out.json") == 0
    assert "by 3 draws" in capsys.readouterr().out
    values = json.loads((tmp_path / "out.json").read_text())
    assert values["draws"] == 3
    assert values["error"] > 0
    assert values["noise"] is None
    assert values["sites"]
    assert run_main("scripted.py:make_batches", *lossy, "--tolerance", "1e-9", "--json", "out.json") == 1
    values = json.loads((tmp_path / "out.json").read_text())
    assert values["noise"] > 0
    assert values["sites"] == []


def test_each_site_is_for_lossy_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("scripted.py", "--each-site") == 2
    assert "Give --lossy, too" in capsys.readouterr().err


def test_arguments_are_those_of_the_script() -> None:
    assert run_main("scripted.py", "a", "--", "--width", "3") == 0
    assert sys.modules["scripted"].ARGUMENTS == ["a", "--width", "3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "missing.py: No such file or directory"),
        (["missing_module:make_step"], "no module is called 'missing_module'"),
        (["plain_script.py"], "plain_script.py has no function 'make_step'"),
        (["scripted:make_it"], "scripted has no function 'make_it'"),
        (["scripted.py:make_nothing"], "returned int"),
        (["scripted.py", "--policy", "int9"], "int9"),
        (["scripted.py", "--min-bytes", "few"], "few"),
        (["scripted.py", "--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json"),
    ],
)
def test_bad_input_is_said_in_a_few_words(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("actstore: ")
    assert message in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("scripted.py:make_raising", "RuntimeError"),
        ("scripted.py:make_cancelled", "CancelledError"),
        ("broken_script.py", "ModuleNotFoundError"),
    ],
)
def test_an_error_of_the_script_is_shown_whole(script: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(script) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert f"actstore: {script} raised {error}" in said


@pytest.mark.parametrize(
    ("script", "exit_"),
    [("scripted.py:make_exiting", "0"), ("scripted.py:make_step_that_exits", "0"), ("unguarded.py", "None")],
)
def test_a_script_that_exits_is_not_equal(script: str, exit_: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(script) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert f"actstore: {script} ended the program (SystemExit: {exit_}) before all was compared" in said


def test_the_example_of_the_message_runs(tmp_path: Path) -> None:
    given = (
        "from torch import nn, ones\nMyModel = lambda: nn.Linear(2, 2)\none_batch = lambda: (ones(1, 2), ones(1, 2))\n"
    )
    (tmp_path / "scripted.py").write_text(f"{given}loss_function = nn.functional.mse_loss\n{EXAMPLE}\n")
    target = load("scripted.py")
    assert target.step().requires_grad
    assert load("scripted").model is not target.model
    with pytest.raises(ConfigError, match="has no function 'make_steps'"):
        load("scripted:make_steps")
