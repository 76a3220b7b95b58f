"""Files of plans and profiles: what is written is read, and nothing else."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actstore import ActivationStore, ActstoreError, Auto, Plan
from actstore.auto.machine import machine_of
from actstore.errors import ConfigError, PayloadError
from actstore.model.units import digest_of
from actstore.plan.plan import FORMAT, Prediction
from actstore.plan.profile import write_json
from actstore.results import Profile
from actstore.session.planning import replan
from tests.plan.profiles import MIB, on_host, profile


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = replan(profile(4), Auto(300 * MIB))._ran(171.5, 299.0 * MIB)
    return replace(made, history=("a step held 301.0 MiB, more than the budget",))


@pytest.fixture(scope="module")
def text(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.write(path)
    return path.read_text()


def test_a_plan_is_read_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for made in (plan, replace(plan, measured=None, bound=None, history=()), replan(on_host(), Auto(400 * MIB))):
        made.write(path)
        assert Plan.read(path) == made
        assert Plan.read(str(path)).explain() == made.explain()


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for made in (profile(), on_host()):
        made.write(path)
        assert Profile.read(path) == made
        json.loads(path.read_text(), parse_constant=pytest.fail)  # any reader's JSON: no infinity


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_byte_is_refused_or_changes_nothing(
    text: str, plan: Plan, tmp_path: Path, data: st.DataObject
) -> None:
    written = bytearray(text.encode())
    at = data.draw(st.integers(0, len(written) - 1))
    written[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "plan.json"
    path.write_bytes(written)
    try:
        found = Plan.read(path)
    except PayloadError as error:
        refusal = error
    else:
        assert found == plan  # a blank between two tokens
        return
    assert str(path) in str(refusal)
    assert refusal.facts["path"] == str(path)


def test_a_changed_figure_is_refused_and_the_next_step_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text.replace('"budget": 314572800', '"budget": 414572800'))
    with pytest.raises(
        PayloadError, match=r"plan\.json: its checksum is .* changed after it was written.*actstore plan"
    ):
        Plan.read(path)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5), st.just([]), st.just({}), st.lists(st.integers(), max_size=2),
)  # fmt: skip


def places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Where values stand in JSON."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_file_edited_by_hand_is_a_plan_or_refused_by_name(text: str, tmp_path: Path, data: st.DataObject) -> None:
    """With a checksum that fits: a figure of another size is believed, a value of another type is not."""
    values = json.loads(text)
    del values["checksum"]
    *path, key = data.draw(st.sampled_from(places(values)[1:]), label="where")
    holder = values
    for step in path:
        holder = holder[step]  # type: ignore[index]
    if data.draw(st.booleans(), label="removed"):
        del holder[key]
    else:
        holder[key] = data.draw(JUNK, label="junk")
    file = tmp_path / "plan.json"
    write_json(file, values)
    with suppress(ActstoreError):
        Plan.read(file).explain()


@pytest.mark.parametrize(
    ("path", "junk", "said"),
    [
        (("rows", 3, "held"), "x", r"rows\[3\]\.held is 'x', not a number"),
        (("budget",), 1.5, "budget is 1.5, not a whole number"),
        (("profile", "figures", "Block", "keep", "forward"), None, r"figures\['Block'\]\['keep'\]\.forward is None"),
        (("profile", "units", 2, "kind"), "Blok", r"units\[2\]\.kind is 'Blok', which has no figures"),
        (("profile", "units", 2, "calls"), 0, r"units\[2\]\.calls is 0"),
        (("profile", "links", "out"), -1, "links.out is -1"),
        (("profile",), 3, "profile is 3, not an object"),
        (("unknown",), 3, "unknown is not a field"),
    ],
)
def test_a_wrong_field_is_named(text: str, tmp_path: Path, path: tuple[str, ...], junk: object, said: str) -> None:
    values = json.loads(text)
    del values["checksum"]
    holder = values
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = junk
    write_json(tmp_path / "plan.json", values)
    with pytest.raises(PayloadError, match=f"not a (plan|profile): {said}"):
        Plan.read(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", f"its format is None, not '{FORMAT}'"),
        ('{"step": 3}', f"its format is None, not '{FORMAT}'"),
        ('{"format": "actstore plan 7"}', f"its format is 'actstore plan 7', not '{FORMAT}'"),
        ('{"format": "actstore plan 1"}', "its checksum is None"),
    ],
)
def test_foreign_files_are_refused(written: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(written)
    with pytest.raises(PayloadError) as refused:
        Plan.read(path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_profile_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().write(path)
    with pytest.raises(PayloadError, match="its format is 'actstore profile 1'"):
        Plan.read(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(PayloadError, match="not JSON"):
        Plan.read(path)


def test_a_path_that_cannot_be_is_said(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json: No such file"):
        Plan.read(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="Choose a path that can be written"):
        plan.write(tmp_path / "no" / "folder.json")


# -- plans for something else ------------------------------------------------------------------------------------------


def of(model: torch.nn.Module) -> Plan:
    """A plan that keeps everything, for this model on this machine."""
    made = profile(1)
    here = replace(made, model=digest_of(model), machine=machine_of(torch.device("cpu")))
    return replace(replan(here, Auto(400 * MIB)), text="* : keep")


def test_the_same_model_takes_a_plan_file(tmp_path: Path) -> None:
    plan = of(torch.nn.Linear(3, 4))
    plan.write(tmp_path / "plan.json")
    store = ActivationStore(torch.nn.Linear(3, 4), Plan.read(tmp_path / "plan.json"))
    assert str(store.policy) == plan.text


@pytest.mark.parametrize(
    "model",
    [torch.nn.Linear(3, 5), torch.nn.Linear(3, 4, dtype=torch.bfloat16), torch.nn.Sequential(torch.nn.Linear(3, 4))],
)
def test_another_model_is_refused(model: torch.nn.Module) -> None:
    plan = of(torch.nn.Linear(3, 4))
    with pytest.raises(ConfigError) as refused:
        ActivationStore(model, plan)
    said = str(refused.value)
    assert f"model: planned for {plan.profile.model}, here {digest_of(model)}" in said
    assert "device:" not in said
    assert "Plan again" in said
    assert "policy=plan.text" in said


@pytest.mark.parametrize("what", ["device", "threads", "torch", "actstore"])
def test_another_machine_is_refused(what: str) -> None:
    model = torch.nn.Linear(3, 4)
    plan = of(model)
    plan.profile.machine[what] = "other"
    with pytest.raises(ConfigError) as refused:
        ActivationStore(model, plan)
    said = str(refused.value)
    assert f"{what}: planned for other, here {machine_of(torch.device('cpu'))[what]}" in said
    assert "model: planned" not in said


def test_a_plan_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ActivationStore\(model, plan\)"):
        ActivationStore(None, of(torch.nn.Linear(3, 4)))


# -- plans side by side ------------------------------------------------------------------------------------------------


def test_two_plans_are_compared(plan: Plan) -> None:
    wide = replan(profile(4), Auto(450 * MIB))
    said = plan.compare(wide).splitlines()
    changed = [row.unit for row, other in zip(plan.rows, wide.rows, strict=True) if row.decision != other.decision]
    assert changed
    assert [line.split(":")[0] for line in said[:-1]] == changed
    assert said[-1].startswith("budget 300.0 MiB -> 450.0 MiB, step ")
    assert plan.compare(plan._ran(1.0, 2.0)) == ""
    assert "blocks.3: " in plan.compare(replan(profile(3), Auto(300 * MIB)))


def test_a_run_is_noted(plan: Plan) -> None:
    assert plan._ran(12.0, 5.0).measured == Prediction(12.0, 5.0)
    assert plan._ran(12.0, 5.0).predicted == plan.predicted
