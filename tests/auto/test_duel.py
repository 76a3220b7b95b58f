"""A plan beside policies in one line: the faster one stays, and the plan says which it was."""

from dataclasses import replace
from math import inf

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Auto, Plan
from actstore.auto import planner, watch
from actstore.auto.excepted import one_lines
from actstore.auto.planner import DUEL_STEPS, Duel
from actstore.auto.profiler import Moments
from tests.auto.test_local import Net, auto, full, run

pytestmark = pytest.mark.usefixtures("one_thread")


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.MultiheadAttention(16, 2), nn.Linear(16, 16)

    def forward(self, x):
        return self.mlp(self.attn(x, x, x)[0].tanh())


def test_policies_in_one_line():
    model = nn.Sequential(Attending(), Attending())
    found = one_lines(model, ["0", "1", "head"], ["0", "1"], ["host"], lossy=True)
    assert found["@blocks : recompute"] == {"0": "recompute", "1": "recompute"}
    assert found["derive"] == {"0": "derive", "1": "derive", "head": "derive"}
    attention = "@attention : keep; @blocks : recompute"
    assert found[attention] == {"0": "attn : keep; recompute", "1": "attn : keep; recompute"}
    assert found["*/@sdpa : keep; @blocks : recompute"]["1"] == "@sdpa : keep; recompute"
    assert found["raw @ host"]["head"] == "raw @ host"
    assert found["@blocks : recompute(raw @ host)"] == {"0": "recompute(raw @ host)", "1": "recompute(raw @ host)"}
    assert found["int8"]["head"] == "int8"
    assert found["derive(int8)"]["head"] == "derive(int8)"
    for text in found:  # each is a policy
        ActivationStore(model, text).close()
    plain = one_lines(nn.Sequential(nn.Linear(4, 4)), ["0"], [], [], lossy=False)
    assert list(plain) == ["@blocks : recompute; * : derive", "derive"]


@pytest.fixture
def plans():
    model = Net()
    store = auto(model, int(0.6 * full()))
    run(model, store, 45)
    plan = replace(store.plan, measured=None, rival="")
    return plan, replace(plan, text="* : derive")


@pytest.mark.parametrize(("times", "wins"), [([3, 5], 0), ([5, 3], 1), ([4, 4], 0)])
def test_the_faster_of_two_plans_stays(plans, times, wins):
    duel = Duel(*plans, "derive")
    for step in range(2 * DUEL_STEPS):
        plan, is_over = duel.add(times[step % 2] + (100 if step < 2 else 0), 10 * step)
        assert is_over == (step == 2 * DUEL_STEPS - 1)
        assert is_over or plan is plans[(step + 1) % 2]
    assert plan.text == plans[wins].text
    assert plan.measured.step == times[wins]
    assert plan.measured.peak == 10 * (2 * DUEL_STEPS - 2 + wins)
    assert plan.rival.startswith(("Faster than 'derive'", "This is 'derive'")[wins])
    assert f"took {times[wins]:.1f} ms a step" in plan.rival
    assert plan.rival in str(plan).replace("\n", " ")


@pytest.mark.parametrize("one_line_is_faster", [True, False])
def test_training_keeps_the_faster_of_plan_and_policy_in_one_line(monkeypatch, tmp_path, one_line_is_faster):
    def total(moments):
        blocks = {decision for name, decision in moments.decisions.items() if name.startswith("blocks")}
        return 1.0 if (blocks == {"recompute"}) == one_line_is_faster else 2.0

    monkeypatch.setattr(planner, "NEAR_SHARE", inf)
    monkeypatch.setattr(watch, "REPLAN_DEVIATION", inf)
    model, budget = Net(), int(0.45 * full())  # all blocks recomputed, or all but one
    store = auto(model, budget)
    texts, peaks = [], []
    for _ in range(60):
        if store.plan is not None:  # from here on times decide
            monkeypatch.setattr(Moments, "total", property(total))
        peaks += run(model, store, 1)
        if store.plan is not None:
            texts.append(store.plan.text)
        if len(texts) == 2 * DUEL_STEPS + 2:
            break
    assert max(peaks) <= budget
    first, second, *_ = texts
    assert first != second
    assert texts[: 2 * DUEL_STEPS] == [first, second] * DUEL_STEPS  # by turns
    assert texts[-2:] == [second if one_line_is_faster else first] * 2
    said = "This is" if one_line_is_faster else "Faster than"
    assert store.plan.rival.startswith(f"{said} '@blocks : recompute'")
    store.plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == store.plan


def test_a_plan_that_is_a_policy_in_one_line_says_so():
    model = Net()
    least = max(run(model, ActivationStore(model, "recompute", min_bytes=0), 1))
    store = ActivationStore(model, Auto(int(1.05 * least)), min_bytes=0)
    torch.manual_seed(0)
    run(model, store, 45)
    assert "'@blocks : recompute" in store.plan.rival


class Shared(Net):
    """Its blocks scale by one tensor, which the first one saves for all."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.scales = []
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, args: args[0] * self.scales[-1])

    def forward(self, x):
        self.scales.append(torch.rand(self.shape))
        return super().forward(x)


@pytest.mark.parametrize(("shape", "kinds"), [((256, 1), 1), ((256, 32), 2)])
def test_a_block_that_saves_hardly_more_is_no_kind_of_its_own(shape, kinds):
    model = Shared(shape)
    store = auto(model, int(0.6 * full()))
    run(model, store, 45)
    assert len({unit.kind for unit in store.plan.profile.units if unit.name.startswith("blocks.")}) == kinds
