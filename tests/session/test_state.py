"""A run that stops and goes on has the weights of one that does not; other states are refused, or say what is lost."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Auto, Bits, Host, Rules, SampleErrors
from actstore.accuracy.bits import chooser
from actstore.auto import machine, planner, watch
from actstore.errors import StateError
from actstore.policy import Keep
from tests.session.resuming import CANDIDATES, POLICIES, STEPS, STOP, Model, Run

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:the disk tier's folder")]

ROOT = Path(__file__).parents[2]
BUDGET, SMALLER = "200KiB", "190KiB"


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    monkeypatch.setattr(chooser, "CANDIDATES", CANDIDATES)


def weights(run):
    return list(run.model.state_dict().values())


def equal(run, other):
    return all(map(torch.equal, weights(run), weights(other)))


def sampled(run):
    """The numbers of the steps whose errors a report has."""
    return {site.error.step for site in run.store.report().sites if site.error is not None}


def planned(policy, **options):
    """A run with a plan."""
    run = Run(policy, **options)
    while run.store.plan is None:
        run.to(run.steps + 1)
        assert run.steps < 3 * STEPS
    return run


# -- the same weights -------------------------------------------------------------------------------------------------


def test_a_fresh_process_goes_on_bit_for_bit(tmp_path):
    whole = {}
    for name, policy in POLICIES.items():
        whole[name] = Run(policy).to(STEPS)
        torch.save(Run(policy).to(STOP).checkpoint(), tmp_path / f"{name}.checkpoint")
    command = [sys.executable, "-m", "tests.session.resuming", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for name, run in whole.items():
        found = torch.load(tmp_path / f"{name}.weights", weights_only=True)
        assert all(map(torch.equal, weights(run), found.values())), name


@pytest.mark.parametrize("name", ["stochastic", "dither", "int2", "bits"])
def test_without_its_state_a_run_differs(name):
    """The test above can fail."""
    first, other = Run(POLICIES[name]).to(4), Run(POLICIES[name])
    checkpoint = first.checkpoint() | {"store": other.store.state_dict()}
    assert not equal(other.resume(checkpoint).to(8), first.to(8))


@pytest.mark.parametrize("stop", [0, 1, 11])
def test_wherever_it_stops(stop):
    first = Run("int8(round=stochastic)").to(stop)
    again = Run("int8(round=stochastic)").resume(first.checkpoint())
    assert equal(again.to(12), first.to(12))


def test_a_state_changes_nothing_in_its_own_run():
    whole, looked = Run(POLICIES["bits"]).to(24), Run(POLICIES["bits"])
    for step in range(24):
        looked.store.state_dict()
        assert looked.store.state_dict() == looked.store.state_dict()
        looked.to(step + 1)
    assert equal(looked, whole)


def test_a_run_goes_back_to_an_earlier_state():
    run = Run(POLICIES["stochastic"]).to(7)
    checkpoint = run.checkpoint()
    wanted = [each.clone() for each in weights(run.to(12))]
    assert all(map(torch.equal, weights(run.resume(checkpoint).to(12)), wanted))


# -- plain data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("stop", [0, 3])
def test_states_are_plain_and_have_the_same_keys(name, stop, tmp_path):
    run = Run(POLICIES[name]).to(stop)
    state = run.store.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert pickle.loads(pickle.dumps(state)) == state
    torch.save(state, tmp_path / "state")
    assert torch.load(tmp_path / "state", weights_only=True) == state
    assert state.keys() == ActivationStore(nn.Linear(2, 2)).state_dict().keys()
    again = Run(POLICIES[name])
    again.store.load_state_dict(json.loads(json.dumps(state)))
    taken = again.store.state_dict()
    assert (taken["steps"], taken["plan"]) == (stop, state["plan"])


def test_a_sampled_step_comes_when_it_is_due():
    options = {"observe": [SampleErrors(8)]}
    whole, run = Run("int8", **options).to(20), Run("int8", **options).to(6)
    again = Run("int8", **options).resume(run.checkpoint())
    assert sampled(again.to(8)) == set()
    assert sampled(again.to(20)) == sampled(whole) == {17}


def test_the_first_step_in_a_process_has_no_time_of_a_step_before():
    again = Run("int8").resume(Run("int8").to(9).checkpoint()).to(10)
    circumstances = again.store._store.circumstances(0)
    assert circumstances.first_step
    assert 0 < circumstances.step_ms < 60_000


# -- "bits" -----------------------------------------------------------------------------------------------------------


HALFWAY = (1, 19, 21, 39)  # the first steps of pairs that measure


@pytest.mark.parametrize("stop", [2, 3, 18, 20, 22])
def test_bits_goes_on_from_between_its_pairs(stop, caplog):
    first = Run(POLICIES["bits"]).to(stop)
    again = Run(POLICIES["bits"]).resume(first.checkpoint())
    assert caplog.text == ""
    assert again.store.choice == first.store.choice
    assert equal(again.to(24), first.to(24))
    assert again.store.choice == first.store.choice


@pytest.mark.parametrize("stop", HALFWAY[:3])
def test_bits_measures_a_pair_again_that_had_begun(stop, caplog):
    again = Run(POLICIES["bits"]).resume(Run(POLICIES["bits"]).to(stop).checkpoint())
    assert "bits: the state was saved between two steps that measure errors: both run again" in caplog.text
    again.to(stop + 3)
    assert again.store.choice is not None


# -- "auto" -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def steady(monkeypatch):
    """No plan is made anew, or runs beside another one, because of times, which differ from run to run."""
    monkeypatch.setattr(watch.StepTimes, "deviate", lambda *_: False)
    monkeypatch.setattr(planner, "NEAR_SHARE", -1.0)


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("auto", [Auto(BUDGET), Auto("230KiB", 0.2)])
def test_auto_runs_its_plan_at_once(auto, caplog):
    run = planned(auto)
    caplog.clear()
    again = Run(auto).resume(run.checkpoint())
    assert caplog.text == ""
    before, probes = run.store.plan, run.store._controller.board.planner.probes
    assert again.store.plan == before
    parts = run.store._controller.gauge.separability
    assert (
        again.store._controller.gauge.separability.seen
        == parts.seen
        == {f"blocks.{n}{part}" for n in range(3) for part in ("", ".up", ".act", ".down")}
    )
    last = run.steps + 12
    assert equal(again.to(last), run.to(last))
    assert again.store.plan.decisions == before.decisions
    assert again.store._controller.board.planner.probes.figures().keys() == probes.figures().keys()
    assert again.store.report().peak_held_bytes == run.store.report().peak_held_bytes
    assert again.store._ledger.budget.limit == run.store._ledger.budget.limit


def test_auto_plans_again_for_another_budget_without_a_measurement(caplog):
    run = planned(Auto(BUDGET))
    again = Run(Auto(SMALLER)).resume(run.checkpoint())
    note = "the budget has changed (device 190.0 KiB, before 200.0 KiB): planned again"
    assert note in caplog.text
    assert again.store.plan is None
    measured = again.store._controller.board.planner.probes.steps
    again.to(run.steps + 1)
    assert (
        again.store._controller.board.planner.probes.steps
        == measured
        == run.store._controller.board.planner.probes.steps
    )
    assert again.store.plan.budget == again.store._ledger.budget.limit == 190 * 1024
    assert note in again.store.plan.history


def test_auto_measures_again_on_another_machine_and_before_a_plan(caplog, monkeypatch):
    checkpoint = planned(Auto(BUDGET)).checkpoint()
    other = machine.machine_of(torch.device("cpu")) | {"device": "another"}
    monkeypatch.setattr(planner, "machine_of", lambda device: other)
    again = Run(Auto(BUDGET)).resume(checkpoint)
    assert "the state was saved on another model or machine (device: planned for" in caplog.text
    assert "here another): measured again" in caplog.text
    assert again.store.plan is None
    assert again.store._controller.board.planner.probes.steps == 0
    caplog.clear()
    measuring = Run(Auto(BUDGET)).to(2)
    again = Run(Auto(BUDGET)).resume(measuring.checkpoint())
    assert "steps were still measured when the state was saved: measured again" in caplog.text
    assert equal(again.to(10), measuring.to(10))


def test_auto_keeps_a_budget_that_it_has_given_up_a_part_of():
    run = planned(Auto(BUDGET))
    run.store._controller.board._give_up(190 * 1024, "memory ran out")
    again = Run(Auto(BUDGET)).resume(run.checkpoint())
    assert again.store._ledger.budget.limit == 190 * 1024
    assert again.store.plan.budget == 190 * 1024
    assert again.store._controller.board.planner.history == run.store._controller.board.planner.history


# -- refused ----------------------------------------------------------------------------------------------------------

OTHERS = {
    "policy": (
        lambda: Run("int8"),
        "the state has policy='* : int8(round=stochastic)', and the store policy='* : int8'",
    ),
    "chooser": (lambda: Run(Bits(max_noise=0.1)), "and the store policy='bits(max_noise=0.1)'"),
    "function": (lambda: Run(nothing), "and the store policy='tests.session.test_state.nothing'"),
    "object": (lambda: Run(Nothing()), "and the store policy='tests.session.test_state.Nothing'"),
    "seed": (lambda: Run("int8(round=stochastic)", seed=1), "the state has seed=0, and the store seed=1"),
    "min_bytes": (lambda: Run("int8(round=stochastic)", min_bytes=64), "has min_bytes=0, and the store min_bytes=64"),
}


def nothing(site, spec):
    return Keep()


class Nothing:
    def __call__(self, site, spec):
        return Keep()


@pytest.mark.parametrize("name", OTHERS)
def test_another_store_is_refused_with_both_names(name):
    make, said = OTHERS[name]
    state, run = Run("int8(round=stochastic)").to(1).store.state_dict(), make()
    before = run.store.state_dict()
    with pytest.raises(StateError) as refused:
        run.store.load_state_dict(state)
    assert said in str(refused.value)
    assert "Make the store as it was when the state was saved, or train on without the state." in str(refused.value)
    assert run.store.state_dict() == before


def test_long_policies_are_shown_where_they_differ():
    long = "; ".join(f"blocks.{n % 3}.up/tag{n} : int8" for n in range(40))
    state = Run(long).store.state_dict()
    with pytest.raises(
        StateError, match=r"policy=\.\.\..*tag39 : int8.*, and the store policy=\.\.\..*tag39 : int4"
    ) as refused:
        Run(long.replace("tag39 : int8", "tag39 : int4")).store.load_state_dict(state)
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize(
    ("depth", "said"),
    [
        (2, "the model of the state has 15 modules, with 'blocks.2', and that of the store 11 modules. "),
        (4, "the model of the state has 15 modules, and that of the store 19 modules, with 'blocks.3'. "),
    ],
)
def test_another_model_is_refused(depth, said):
    state = Run("int8").store.state_dict()
    with pytest.raises(StateError) as refused:
        ActivationStore(Model(depth), "int8", min_bytes=0).load_state_dict(state)
    assert said in str(refused.value)
    assert refused.value.field == "model"


def test_auto_refuses_another_noise():
    state = planned(Auto(BUDGET)).store.state_dict()
    with pytest.raises(StateError, match=r"policy='auto\(max_noise=0\)', and the store policy='auto\(max_noise=0.1\)'"):
        Run(Auto(BUDGET, 0.1)).store.load_state_dict(state)


CHANGES = {
    "nothing": lambda state: {},
    "no_state": lambda state: None,
    "weights": lambda state: {"weight": torch.zeros(2)},
    "older": lambda state: state | {"format": "actstore state 0"},
    "one_more": lambda state: state | {"more": 1},
    "one_less": lambda state: {name: value for name, value in state.items() if name != "steps"},
    "steps": lambda state: state | {"steps": state["steps"] + 1},
    "a_tensor": lambda state: state | {"steps": torch.tensor(4)},
    "controller": lambda state: state | {"controller": state["controller"].replace("16", "17")},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_no_state_is_refused(name):
    state, run = Run(POLICIES["bits"]).to(3).store.state_dict(), Run(POLICIES["bits"])
    changed = CHANGES[name](state)
    assert changed != state
    with pytest.raises(StateError, match=r"its (format|checksum) is .*, (not|that of its contents) 'a?"):
        run.store.load_state_dict(changed)
    assert run.store.choice is None


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_inside_of_a_step_both_are_refused(call):
    run = Run("int8").to(1)
    arguments = [run.store.state_dict()] if call == "load_state_dict" else []
    with pytest.raises(StateError, match=rf"{call}\(\) was called inside the store's own context"), run.store:
        getattr(run.store, call)(*arguments)
    getattr(run.store, call)(*arguments)


def test_a_closed_store_has_a_state_and_takes_none():
    for policy in POLICIES.values():
        run = Run(policy).to(3)
        before = run.store.state_dict()
        run.store.close()
        assert run.store.state_dict() == before
    with pytest.raises(StateError, match="this store is closed"):
        run.store.load_state_dict(before)


def test_equal_policies_may_be_written_in_other_ways():
    state = Run("int8(round=stochastic)").to(3).store.state_dict()
    other = Run(Rules.parse("* : int8(round=stochastic)"), tiers=[Host("1GiB")])
    other.store.load_state_dict(state)
    assert other.store.state_dict()["steps"] == 3
