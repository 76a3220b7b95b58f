"""``actstore plan``, and plans in ``actstore show``, as a user meets them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from actstore import ActivationStore, Auto, Plan, make_plan
from actstore.base.units import format_nbytes
from actstore.bench import workloads
from actstore.bench.workloads.workload import Workload
from actstore.cli import app as cli
from actstore.errors import ConfigError, StateError
from actstore.plan import plot as plan_plot
from actstore.plan.study import Study
from actstore.results import Profile
from actstore.session.planning import replan
from tests.plan.profiles import MIB, on_host, profile

SCRIPT = """
from actstore.bench import workloads
from actstore.bench.workloads.workload import Workload
from actstore.plan import plot as plan_plot
import torch


def make_step():
    torch.set_num_threads(1)
    work = Workload(layers=2, width=64, heads=2, context=32, batch=4)
    job = workloads.make(work)
    model, batch = job.model, job.batch(0)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()

    return model, step


def make_broken():
    model, _ = make_step()
    return model, lambda: model(None, None)
"""
TINY = Workload(layers=2, width=64, heads=2, context=32, batch=4)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """A folder with a script, a profile and a plan; imports and arguments are as before at the end."""
    (tmp_path / "planned.py").write_text(SCRIPT)
    profile(4).write(tmp_path / "profile.json")
    replan(profile(4), Auto(300 * MIB)).write(tmp_path / "old.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "planned", None)
    monkeypatch.delitem(sys.modules, "planned")
    monkeypatch.setattr("actstore.plan.explain.SHOWN_BUDGETS", 2)
    monkeypatch.setattr(plan_plot, "FRONT_POINTS", 4)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["actstore", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


# -- end to end --------------------------------------------------------------------------------------------------------


def test_a_script_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(
        monkeypatch, "plan", "planned.py", "--budget", "1MiB", "--min-bytes", "0",
        "--output", "plan.json", "--profile", "measured.json", "--plot", "plan.png",
    )  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    plan = Plan.read(tmp_path / "plan.json")
    assert plan.measured is not None
    assert plan.measured.peak <= plan.budget == MIB
    assert [row.unit for row in plan.rows] == ["characters", "positions", "blocks.0", "blocks.1", "norm", "head", ""]
    assert plan.profile.memory.optimizer
    assert said.out.startswith("Budget 1.0 MiB for ")
    assert said.out.rstrip().endswith('To run it: ActivationStore(model, actstore.Plan.read("plan.json"))')
    assert f"ActivationStore(model, POLICY):\n\n{plan.text}\n" in said.out
    assert Profile.read(tmp_path / "measured.json") == plan.profile
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    job = workloads.make(TINY)
    model = job.model
    with ActivationStore(model, plan, min_bytes=0) as store:
        loss = model(*job.batch(0))
    loss.backward()
    assert store.report().peak_held_bytes <= plan.budget


def test_a_total_is_planned_and_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "plan", "planned.py", "--total", "64MiB", "--min-bytes", "0", "--output", "plan.json") == 0
    said = " ".join(capsys.readouterr().out.split())
    plan = Plan.read(Path("plan.json"))
    assert plan.limits["total"] == 64 * MIB
    assert plan.profile.memory.temporary is not None
    assert plan.profile.memory.reserved + plan.budget == 64 * MIB
    assert f"The total of 64.0 MiB bounds their sum: activations may hold up to {format_nbytes(plan.budget)}." in said


def test_too_small_a_budget_is_one_line_with_the_least(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", "profile.json", "--budget", "50MiB") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    least = Study(replan(profile(4), Auto(300 * MIB))).front(2)[0].device
    assert f"at least {least / MIB:.1f} MiB are needed, in backward of " in said.err


def test_a_profile_is_planned_without_running_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", "profile.json", "--budget", "350MiB", "--against", "old.json") == 0
    said = capsys.readouterr().out
    made, old = replan(profile(4), Auto(350 * MIB)), replan(profile(4), Auto(300 * MIB))
    assert f"\nAgainst old.json:\n{old.compare(made)}\n" in said
    assert old.compare(made)
    assert made.text in said
    assert run(monkeypatch, "plan", "profile.json", "--budget", "300MiB", "--against", "old.json") == 0
    assert "Against old.json:\nthe same decisions" in capsys.readouterr().out


def test_budgets_and_errors_reach_the_planner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-noise", "0.02", "--host-budget", "64MiB", "--disk-budget", "1GiB", "--output", "plan.json"]
    assert run(monkeypatch, "plan", "profile.json", "--budget", "300MiB", *options) == 0
    limits = Plan.read(tmp_path / "plan.json").limits
    assert limits == {"device": 300 * MIB, "host": 64 * MIB, "disk": 1024 * MIB, "max_noise": 0.02}
    assert "int8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["planned.py", "--budget", "few"], "Auto(budget)='few': must be a number of bytes"),
        (["planned.py", "--budget", "1MiB", "--max-noise", "-2"], "Auto(max_noise)=-2.0: must be a fraction"),
        (["planned.py", "--budget", "1MiB", "--plot", "plan.txt"], "--plot plan.txt: give a file that ends in"),
        (["planned.py", "--budget", "1MiB", "--output", "/no/such/folder/x.json"], "--output /no/such/folder/x.json"),
        (["planned.py", "--budget", "1MiB", "--against", "profile.json"], "its format is 'actstore profile 1'"),
        (["missing.py", "--budget", "1MiB"], "missing.py: No such file"),
        (["missing.json", "--budget", "1MiB"], "missing.json: No such file"),
        (["old.json", "--budget", "1MiB"], "its format is 'actstore plan 1'"),
        (["profile.json", "--budget", "1GiB", "--disk-path", "."], "nothing is run"),
    ],
)
def test_bad_input_is_said_in_a_few_words(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("actstore: ")
    assert message in said
    assert "Traceback" not in said


def test_a_budget_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "plan", "planned.py") == 2
    assert "--budget" in capsys.readouterr().err


def test_an_error_of_the_script_is_shown_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", "planned.py:make_broken", "--budget", "1MiB") == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "planned.py:make_broken raised TypeError" in said


# -- show --------------------------------------------------------------------------------------------------------------


def test_a_plan_is_shown_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "show", "old.json", "--plot", "old.svg") == 0
    assert capsys.readouterr().out == Plan.read("old.json").explain() + "\n"
    drawn = (tmp_path / "old.svg").read_text()
    assert drawn.count("<!-- blocks.") == 4
    for words in ("What memory buys", "this plan", "no choice is faster", "plain", "budget, 300.0 MiB"):
        assert f"<!-- {words}" in drawn


def test_a_profile_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "show", "profile.json") == 0
    said = capsys.readouterr().out
    assert said == f"{Profile.read('profile.json')}\n"
    assert "blocks.0 and 3 like it" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile.json", "--plot", "x.png"], "--plot draws plans, and this is a profile"),
        (["profile.json", "--step", "3"], "which is a profile and not a trace"),
        (["old.json", "--chrome", "x.json"], "which is a plan and not a trace"),
        (["changed.json"], "changed after it was written"),
        (["later.json"], "its format is 'actstore plan 2'"),
    ],
)
def test_what_cannot_be_shown_is_said(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (tmp_path / "old.json").read_text()
    (tmp_path / "changed.json").write_text(text.replace("blocks.1", "blocks.9"))
    (tmp_path / "later.json").write_text(text.replace("actstore plan 1", "actstore plan 2"))
    assert run(monkeypatch, "show", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "made", [replan(on_host(), Auto(300 * MIB)), replan(profile(1), Auto(400 * MIB))._ran(30.0, 100.0)]
)
def test_any_plan_is_drawn(made: Plan, tmp_path: Path) -> None:
    plan_plot.save(made, tmp_path / "plan.svg")
    assert ("measured" in (tmp_path / "plan.svg").read_text()) is (made.measured is not None)


# -- make_plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["returns the loss", "enters the store"])
def test_a_step_is_planned_in_either_form(form: str) -> None:
    job = workloads.make(TINY)
    model, batch = job.model, job.batch(0)
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def step(store: ActivationStore) -> None:
        with store:
            loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = make_plan(model, step if form == "enters the store" else lambda: model(*batch), "1MiB", min_bytes=0)
    assert plan.measured is not None
    assert plan.measured.peak <= MIB
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state


def test_steps_that_cannot_be_planned_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = workloads.make(TINY)
    model, batch = job.model, job.batch(0)
    with pytest.raises(ConfigError, match="computed no gradient"):
        make_plan(model, lambda: None, "1MiB")
    with pytest.raises(ConfigError, match="the step takes a, b"):
        make_plan(model, lambda a, b: None, "1MiB")
    with ActivationStore(model), pytest.raises(StateError, match="inside a store's context"):
        make_plan(model, lambda: model(*batch), "1MiB")
    monkeypatch.setattr("actstore.session.planning.MAX_STEPS", 3)
    with pytest.raises(StateError, match="3 steps ran, and none could be measured"):
        make_plan(torch.nn.Linear(2, 2), lambda: model(*batch), "1MiB")
