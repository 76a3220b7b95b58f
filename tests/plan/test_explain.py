"""A plan in words: each sentence says what the solver's figures say."""

from dataclasses import replace

import pytest

from actstore import Auto, Plan
from actstore.base.units import format_nbytes
from actstore.display.text import WIDTH
from actstore.errors import CapacityError
from actstore.plan.explain import explain, groups_of
from actstore.plan.profile import Memory
from actstore.plan.study import Study
from actstore.session.planning import replan
from tests.plan.profiles import MIB, on_host, profile

TIGHT, WIDE = 500 * MIB, 2000 * MIB


@pytest.fixture(scope="module")
def plan() -> Plan:
    return replan(profile(), Auto(TIGHT))


@pytest.fixture(scope="module")
def text(plan: Plan) -> str:
    return explain(plan._ran(400.0, 490.0 * MIB))


@pytest.fixture(autouse=True)
def few_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them takes the solver's time; `text` has them all."""
    monkeypatch.setattr("actstore.plan.explain.SHOWN_BUDGETS", 2)


def section(plan: Plan, begins: str) -> str:
    """The paragraph that begins so, on one line."""
    found = [part for part in explain(plan).split("\n\n") if part.startswith(begins)]
    return " ".join(found[0].split()) if found else ""


def test_a_dozen_blocks_fit_on_a_screen(text: str) -> None:
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= WIDTH


def test_many_blocks_do_too() -> None:
    assert len(explain(replan(profile(96), Auto(4000 * MIB))).splitlines()) <= 36


def test_the_headline_has_prediction_bound_and_measurement(plan: Plan) -> None:
    first = section(plan, "Budget")
    assert first.startswith(
        f"Budget 500.0 MiB for {format_nbytes(plan.profile.saved)} of activations: {plan.certificate}"
    )
    assert "Measured" not in first
    run = section(plan._ran(1.1 * plan.predicted.step, 400.0 * MIB), "Budget")
    assert "(+10.0 %), peak 400.0 MiB, 80.0 % of the budget." in run


def test_units_that_decide_alike_share_a_line(plan: Plan) -> None:
    rows = list(plan.rows)
    alternate = [
        replace(row, decision="recompute" if row.unit in {"blocks.0", "blocks.1", "blocks.2", "blocks.4"} else "keep")
        for row in rows
    ]
    names = [(group.name, len(group.rows)) for group in groups_of(replace(plan, rows=tuple(alternate)))]
    assert names == [("wte, head", 2), ("blocks.0-2, 4", 4), ("blocks.3, 5-11", 8), ("(model and loss)", 1)]


def test_the_table_adds_up(plan: Plan, text: str) -> None:
    groups = groups_of(plan)
    assert sum(len(group.rows) for group in groups) == len(plan.rows)
    assert sum(group.total("saved") for group in groups) == plan.profile.saved
    for group in groups:
        line = next(line for line in text.splitlines() if line.startswith(f"{group.name} "))
        assert format_nbytes(group.total("held")) in line
        assert line.endswith(f"  {group.rows[0].decision}")


def test_each_reason_is_the_evaluators(plan: Plan) -> None:
    """What a unit's other decisions would cost, from the solver's own timeline."""
    study, said = Study(plan), section(plan, "  ")
    assert study.choice is not None
    barred = 0
    for group in groups_of(plan):
        if group.rows[0].decision == "keep" or group.total("saved") < 0.03 * plan.profile.saved:
            continue
        keep = next(other for other in study.others(group.first) if other.decision == "keep")
        freed = format_nbytes(group.total("saved") - group.total("held"))
        assert f"{group.name}: frees {freed} for {group.total('extra') + group.total('stall'):.1f} ms" in said
        if keep.breaks and keep.slower < -0.001 * plan.predicted.step:
            barred += 1
            assert (
                f"'keep' would be {-keep.slower:.1f} ms faster, but the budget is {format_nbytes(keep.over)} short"
                in said
            )
    assert barred


def test_a_lossy_decision_is_barred_without_an_error(plan: Plan) -> None:
    assert not any("int8" in option.decision for layer in Study(plan).chain.layers for option in layer.options)
    lossy = replan(profile(), Auto(TIGHT, max_noise=0.02))
    assert any("int8" in row.decision for row in lossy.rows)
    assert lossy.predicted.step < plan.predicted.step


def test_what_memory_buys_is_what_the_solver_finds(plan: Plan, text: str) -> None:
    lines = text[text.index("What memory buys") :].split("\n\n", maxsplit=1)[0].splitlines()[2:]
    cells = [line.split() for line in lines]
    budgets = [(float(row[0]) * {"MiB": MIB, "GiB": 1024 * MIB}[row[1]], float(row[2])) for row in cells]
    assert len(budgets) >= 5
    assert budgets == sorted(budgets)
    assert [step for _, step in budgets] == sorted((step for _, step in budgets), reverse=True)
    assert "least" in lines[0]
    assert [line.split()[:2] for line in lines if "this plan" in line] == [["500.0", "MiB"]]
    assert lines[-1].split()[2:] == [f"{plan.plain:.1f}", "1.000", "12", "keep"]
    middle = Study(plan).front(3)[1]
    again = replan(plan.profile, Auto(int(middle.device) + 1))
    assert again.predicted.step == pytest.approx(middle.step, rel=0.01)


def test_the_least_budget_is_the_least(plan: Plan) -> None:
    least = Study(plan).front(2)[0].device
    with pytest.raises(CapacityError):
        replan(plan.profile, Auto(int(0.99 * least)))


def test_the_price_of_memory_is_said_per_unit_that_matters(plan: Plan) -> None:
    assert plan.prices["device"] > 0
    said = section(plan, "What limits")
    assert f"one more MiB on the device saves {plan.prices['device']:.2g} ms a step" in said
    large = replace(plan, budget=8 * 2**30)
    assert f"one more GiB on the device saves {1024 * plan.prices['device']:.2g} ms" in section(large, "What limits")


def test_where_everything_fits_nothing_is_asked_for() -> None:
    said = explain(replan(profile(), Auto(WIDE)))
    assert "costs no time" in said
    assert "everything fits" in said
    assert "At the margin" not in said
    assert "short" not in said


def test_where_memory_goes() -> None:
    said = section(replan(profile(memory=Memory(600 * MIB, 300 * MIB, None, 0)), Auto(WIDE)), "Where")
    assert "parameters 600.0 MiB" in said
    assert "gradients 300.0 MiB" in said
    assert "(logits) 20.0 MiB" in said
    assert "no optimizer has stepped" in said
    assert "buffers" not in said
    assert "not the problem" not in said


def test_an_optimizer_that_sets_the_peak_is_named() -> None:
    states = Memory(600 * MIB, 600 * MIB, 1200 * MIB, 0, 3000 * MIB)
    assert "The optimizer sets the peak: its step needs about 2.9 GiB" in explain(
        replan(profile(memory=states), Auto(WIDE))
    )
    assert "sets the peak" not in explain(replan(profile(memory=replace(states, updating=MIB)), Auto(WIDE)))
    total = replan(profile(memory=states), Auto(total=states.lasting + TIGHT))
    assert total.decisions == replan(profile(memory=states), Auto(TIGHT)).decisions


@pytest.mark.parametrize(
    ("memory", "largest", "advice"),
    [
        (Memory(9000 * MIB, 0, 0, 0), "parameters", "FSDP2"),
        (Memory(3000 * MIB, 3001 * MIB, 0, 0), "gradients", "LoRA"),
        (Memory(3000 * MIB, 3000 * MIB, 6000 * MIB, 0), "optimizer states", "8-bit"),
    ],
)
def test_when_activations_are_not_the_problem(memory: Memory, largest: str, advice: str) -> None:
    said = section(replan(profile(memory=memory), Auto(WIDE)), "Where")
    assert f"Activations are not the problem here: even all kept they are 1.2 GiB. Most is in {largest}: " in said
    assert advice in said


def test_when_the_loss_is_the_problem() -> None:
    said = section(replan(profile(logits=3000 * MIB), Auto(4000 * MIB)), "Where")
    assert "The model itself and its loss hold 2.9 GiB" in said
    assert "in chunks" in said


def test_reasons_to_plan_again_are_the_last_ones(plan: Plan) -> None:
    assert section(replace(plan, history=("memory ran out",)), "Planned") == "Planned again because memory ran out"
    said = section(replace(plan, history=tuple(f"reason {i}" for i in range(9))), "Planned")
    assert said == "Planned again, 6 times before and because reason 6 reason 7 reason 8"


def test_a_plan_made_by_hand_has_no_reasons_and_no_error(plan: Plan) -> None:
    rows = tuple(replace(row, decision="nf4") if row.unit == "blocks.3" else row for row in plan.rows)
    said = explain(replace(plan, rows=rows))
    assert "nf4" in said
    assert "faster, but" not in said


def test_budgets_that_cannot_be_are_said_and_the_rest_stands(plan: Plan) -> None:
    said = explain(replace(plan, limits={**plan.limits, "device": 1.0}, budget=1))
    assert "Where" in said
    broken = replace(plan, profile=replace(plan.profile, units=()), rows=())
    assert "What more memory would buy: not known (" in explain(broken)


def test_on_a_cpu() -> None:
    said = explain(replan(on_host(), Auto(300 * MIB)))
    assert "raw @ host" not in said
    assert "recompute" in said


def test_what_steps_held_beyond_the_prediction_counts_in_every_budget(plan: Plan) -> None:
    tighter = replace(plan, budget=plan.budget + 30 * MIB)  # planned with 30 MiB less than the budget
    before, after = Study(plan).front(2), Study(tighter).front(2)
    assert [b.device - a.device for a, b in zip(before, after, strict=True)] == [30 * MIB] * len(before)
    assert Study(tighter).others(3) == Study(plan).others(3)
