"""Rows of a fit for "auto": the plan that it would choose, and what this plan needs."""

import json
import re
from contextlib import closing
from math import inf

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Auto, fit_step, make_plan
from actstore.devices import cpu_memory
from actstore.errors import CapacityError, ConfigError
from actstore.inspection.fit import work
from actstore.inspection.fit.plans import quick_row_of
from actstore.inspection.fit.steps import DrySteps
from actstore.plan.hardware import Hardware
from actstore.plan.solver.chain import Links
from tests.inspection.steps_to_fit import SIZES, make_mlp, maker, measured

TOLERANCE = 0.03
CPU = Hardware(Links(on_host=True), flops=1e8, single_flops=1e8, memory_rate=1e7)

pytestmark = pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here")


@pytest.fixture
def rates(monkeypatch):
    """Set the rates of the device, which training reaches in full."""

    def use(device):
        monkeypatch.setattr("actstore.inspection.fit.fit.rates_of", lambda name: device)
        monkeypatch.setattr(work, "FLOPS_SHARES", (1.0,))
        monkeypatch.setattr(work, "MEMORY_SHARES", (1.0,))

    use(CPU)
    return use


def between(make_step, share):
    """Return a memory between the bytes of a step that recomputes all and those of one that keeps all."""
    keep, recompute = (row.peak_bytes for row in fit_step(make_step, ["recompute"]).rows)
    return round(recompute + share * (keep - recompute))


def planned_row(make_step, memory, **options):
    return fit_step(make_step, ["auto"], memory=memory, **options).rows[1]


def without_batch(make_step):
    """Return the same step without an argument to search."""

    def make():
        return make_step()

    return make


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("gpt", 0.5),
        *(
            pytest.param(name, share, marks=pytest.mark.slow)
            for name in SIZES
            for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
        ),
    ],
)
def test_peak_of_a_plan_is_that_of_the_allocator_when_the_plan_runs(name, share, rates):
    make_step = without_batch(maker(name))
    memory = between(make_step, share)
    row = planned_row(make_step, memory)
    assert row.frugal_bytes <= row.peak_bytes <= memory
    assert abs(row.peak_bytes / measured(make_step, row.plan) - 1) < TOLERANCE


def test_bytes_of_a_dry_profile_are_those_of_a_measured_one():
    make_step = maker("gpt")
    dry = DrySteps(make_step, {}, torch.optim.AdamW, CPU).profile()
    real = make_plan(*make_step(), dry.saved // 2).profile
    assert [(unit.name, unit.calls, unit.parts) for unit in dry.units] == [
        (unit.name, unit.calls, unit.parts) for unit in real.units
    ]
    assert dry.memory == real.memory or real.memory.optimizer is None  # that step trains no weights
    for unit in real.units:
        both = dry.figures[unit.kind].keys() & real.figures[unit.kind].keys() - {"expack"}  # of variable size
        assert both
        for decision in both:
            one, other = dry.figures[unit.kind][decision], real.figures[unit.kind][decision]
            assert (one.parts, one.transient) == (other.parts, other.transient)
    blocks = dry.figures[dry.units[2].kind]
    assert {"keep", "recompute", "derive", "mlp : recompute", "@matmul : keep; recompute"} <= blocks.keys()


def test_predicted_time_of_a_plan_is_that_of_its_dry_step(rates):
    make_step = without_batch(maker("gpt"))
    memory = between(make_step, 0.1)
    plain, row = fit_step(make_step, ["auto"], memory=memory, device="cpu").rows
    assert "recompute" in row.plan
    assert row.ms[0] > 1.01 * plain.ms[0]
    again = fit_step(make_step, [row.plan], device="cpu").rows[1]
    assert (again.peak_bytes, again.ms) == (row.peak_bytes, row.ms)
    everything = fit_step(make_step, ["recompute"], device="cpu").rows[1]
    assert row.ms[0] < everything.ms[0]


def test_a_memory_for_everything_needs_no_decision(rates):
    row = planned_row(without_batch(make_mlp), "10GiB")
    assert row.plan == "* : keep"
    assert row.peak_bytes == fit_step(make_mlp, ["keep"]).rows[1].peak_bytes


def test_of_a_memory_that_is_too_small_the_plan_that_needs_least_is_shown(rates):
    make_step = without_batch(maker("gpt", layers=1))
    found = fit_step(make_step, ["auto"], memory="1MiB")
    row = found.rows[1]
    assert row.peak_bytes == row.frugal_bytes < found.rows[0].peak_bytes
    assert "  no  " in str(found).splitlines()[2]


def test_a_plan_for_a_gpu_uses_host_memory_where_its_link_is_fast(rates):
    def make_step():
        block = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(12)]
        model, x = nn.Sequential(*block), torch.ones(2048, 256)
        return model, lambda: model(x).square().mean()

    memory = between(make_step, 0.5)
    slow = Hardware(Links(out=1e3, back=1e3), flops=1e9, single_flops=1e9, memory_rate=1e8)
    rates(slow)
    assert "host" not in planned_row(make_step, memory).plan
    rates(Hardware(Links(out=inf, back=inf), flops=1e5, single_flops=1e5, memory_rate=1e4))
    row = planned_row(make_step, memory)
    assert "raw @ host" in row.plan
    assert row.most_bytes <= memory


def test_a_budget_of_activations_is_kept(rates):
    make_step = without_batch(maker("gpt", layers=1))
    for policy in ("auto(24MiB)", Auto("24MiB")):
        row = fit_step(make_step, [policy]).rows[1]
        assert (row.policy, row.budget_bytes, row.frugal_bytes, row.ms) == ("auto(24MiB)", 24 << 20, None, None)
        model, step = make_step()
        with closing(ActivationStore(model, row.plan)) as store:
            for _ in range(2):
                with store:
                    loss = step()
                loss.backward()
            assert store.report().peak_held_bytes <= 24 << 20


@pytest.mark.parametrize("policy", ["auto", "auto(24MiB)"])
def test_largest_batch_of_a_plan_is_that_of_a_trial_of_each(policy, rates):
    make_step = maker("gpt", layers=1)
    limit = 60 << 20
    found = fit_step(make_step, [policy], memory=limit, batch=6).largest[policy]["batch"]

    def fits(batch):
        steps = DrySteps(make_step, {"batch": batch}, torch.optim.AdamW, CPU)
        try:
            return quick_row_of(steps, policy, limit).most_bytes <= limit
        except CapacityError:
            return False

    assert fits(found)
    assert not fits(found + 1)
    assert found > fit_step(make_step, [], memory=limit).largest["plain"]["batch"] or policy != "auto"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SIZES))
def test_largest_batch_under_a_plan_is_within_one_step_of_the_true_one(name, rates):
    make_step, batch = maker(name), SIZES[name]["batch"]
    steps = DrySteps(make_step, {"batch": batch}, torch.optim.AdamW, CPU)
    limit = measured(make_step, quick_row_of(steps, "auto", 1 << 40).plan, batch=batch)
    found = fit_step(make_step, ["auto"], memory=limit, batch=batch // 2).largest["auto"]["batch"]
    assert batch - 1 <= found <= batch + 1


def test_a_step_may_enter_the_store_several_times(rates):
    def make_step():
        model, _ = make_mlp(device="cpu")

        def step(store):
            for _ in range(2):
                with store:
                    loss = model(torch.ones(2048, 512)).square().mean()
                loss.backward()

        return model, step

    memory = between(make_step, 0.5)
    assert planned_row(make_step, memory).peak_bytes <= memory


def test_a_step_that_never_enters_the_store_has_no_plan(rates):
    def make_step():
        model, _ = make_mlp(device="cpu")

        def step(store):
            return model(torch.ones(2048, 512)).square().mean()

        return model, step

    with pytest.raises(ConfigError, match="needs a step with a backward through the model"):
        planned_row(make_step, "1GiB")


def test_auto_is_among_the_rows_of_a_memory(rates):
    make_step = without_batch(make_mlp)
    policies = [row.policy for row in fit_step(make_step, memory="1GiB").rows]
    assert policies == ["plain", "keep", "recompute", "int8", "int4", "raw @ host", "raw @ disk", "auto"]
    assert "auto" not in [row.policy for row in fit_step(make_step).rows]
    assert "auto" not in [row.policy for row in fit_step(make_step, memory="1GiB", fsdp=2).rows]


def test_the_plan_is_below_the_table_and_in_the_json(rates):
    make_step = without_batch(maker("gpt", layers=3))
    found = fit_step(make_step, ["auto"], memory=between(make_step, 0.0))
    row = found.rows[1]
    note = " ".join(str(found).splitlines()[3:-1])
    assert note.startswith("auto: plan for ")
    assert re.search(r"; blocks\.\d-\d\S* : ", note)
    assert "; * : keep" in note
    values = json.loads(found.to_json())["rows"][1]
    assert (values["plan"], values["budget_bytes"], values["frugal_bytes"], values["peak_at"]) == row[-4:]


@pytest.mark.parametrize(
    ("policy", "options", "error", "words"),
    [
        ("auto", {}, ConfigError, "needs a memory or a budget"),
        ("bits(0.1)", {}, ConfigError, "chooses by the errors of payloads"),
        ("auto(1GiB, max_noise=0.1)", {}, ConfigError, "chooses by the errors of payloads"),
        ("auto(1GiB)", {"fsdp": 2}, ConfigError, "plans for one rank"),
        ("auto(64KiB)", {}, CapacityError, "no plan fits into 64.0 KiB of device memory: at least"),
    ],
)
def test_what_cannot_be_planned_is_refused(policy, options, error, words, rates):
    with pytest.raises(error, match=words):
        fit_step(without_batch(make_mlp), [policy], **options)


def test_a_plan_may_run_mlps_in_tiles(rates):
    """Less than the least budget of exact plans, and the step of the plan needs less than any of these."""
    make_step = maker("gpt")
    with pytest.raises(CapacityError) as refused:
        fit_step(make_step, ["auto(64KiB)"])
    budget = int(0.75 * refused.value.facts["least"])
    with pytest.raises(CapacityError):
        fit_step(make_step, [f"auto({budget})"])
    row = fit_step(make_step, [f"auto({budget}, tiles)"]).rows[1]
    assert "blocks.1.mlp : recompute(tiles=8)\nblocks.1 : recompute\n" in row.plan
    assert row.peak_bytes < 0.9 * fit_step(make_step, ["recompute"]).rows[1].peak_bytes
