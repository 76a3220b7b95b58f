"""Plans of compiled models that encode saved tensors with a loss."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from math import inf
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from actstore import ActivationStore, Auto, Disk, Window
from actstore.auto.graph import lossy_modules
from actstore.compiled import budget_partition
from actstore.compiled.budget.ladder import PlanLadder, Rung, cuts_of
from actstore.compiled.budget.lossy import LossyModules
from actstore.compiled.budget.step import RegionEvaluation, RegionStep
from actstore.errors import CapacityError
from actstore.plan.profile import Profile, Unit, UnitBytes, UnitFigures
from tests.autograd.checks import check_drained, check_same, gc_off
from tests.compiled.budget.test_budget import OUTSIDE_NBYTES, measured
from tests.compiled.models import BATCHES, Deep, Mlp, error, gradients, make, plain
from tests.compiled.test_decisions import CASES, Deciding, Inside, input_gradient

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself
MAX_EAGER_STEPS = 60
NOISE = {f"blocks.{number}": 1e-6 for number in range(5)}


def planned(
    kind: Any, budget: int | str, noise: Mapping[str, float | None] | None = NOISE, **options: Any
) -> tuple[nn.Module, Tensor, Any]:
    """A model that is compiled within a budget, with this noise of modules, or with one that eager steps measure."""
    torch._dynamo.reset()
    model, x = make(kind)
    backend = options.pop("backend", "aot_eager")
    store: Any = ActivationStore(model, Auto(budget, max_noise=0.1), **options)
    store.compile(backend=backend)
    if noise is not None:
        store._controller.resume({"plan": None, "noise": dict(noise)}, None)
    return model, x, store


@cache
def least(kind: Any) -> int:
    """The least budget without a loss."""
    model, x, store = planned(kind, 1000, {})
    with pytest.raises(CapacityError) as refusal, store:
        model(x)
    found: int = refusal.value.facts["least"]
    return found


@pytest.fixture
def encodes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans encode all that may be encoded of what PyTorch saves."""

    def ladder_of(step: RegionStep, saved: frozenset[int], others: Any = ()) -> PlanLadder:
        plain = step.evaluate(saved)
        units = cuts_of(step, plain)[0]
        return PlanLadder(plain, (Rung(units, (), step.encoding(plain, set(step.encodable(plain)))),))

    def needed(self: budget_partition.BudgetPartition, found: RegionEvaluation) -> float:
        return 0 if found.encoded else inf

    monkeypatch.setattr(budget_partition, "ladder_of", ladder_of)
    monkeypatch.setattr(budget_partition.BudgetPartition, "_needed", needed)


@pytest.mark.usefixtures("encodes_all")
def test_eager_steps_measure_then_the_plan_encodes() -> None:
    wanted = plain(Deep)
    model, x, store = planned(Deep, "30MiB", None)
    compiled_steps = 0
    for number in range(MAX_EAGER_STEPS):
        torch.manual_seed(number)
        with store:
            loss = model(torch.randn_like(x)).square().mean()
        loss.backward()
        model.zero_grad()
        check_drained(store)
        compiled_steps += store.graph_plan is not None
        if compiled_steps == 2:
            break
    else:
        pytest.fail("the model was not compiled")
    found = gradients(model, x, store)
    plan = store.graph_plan
    assert 0 < plan.encoded <= plan.held
    assert 0 < plan.noise <= 0.1
    assert 0 < error(found, wanted) < 0.01
    assert f"{plan.noise:.2g} of the variance" in str(plan)
    assert "as int8" in str(plan)
    assert type(plan).from_dict(plan.to_dict()) == plan
    report = store.report()
    encoded = [site for site in report.sites if site.decision == "int8"]
    assert encoded
    assert {site.note for site in encoded} == {""}
    assert all(3.5 < site.saved_bytes / site.stored_bytes < 4 for site in encoded)
    assert {site.error for site in report.sites} == {None}, "errors of eager steps are not those of the graphs"
    check_same(gradients(model, x, store), found)
    check_drained(store)


DECIDE_IN_ONE_OPERATOR = {"hardtanh", "relu6", "hardswish's kinks"}  # which compares: their tensors stay exact


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("encodes_all")
def test_what_passes_is_what_passes_without_a_loss(name: str) -> None:
    torch.manual_seed(0)
    model, x = Inside(Deciding(CASES[name], product=True)), torch.randn(64, 256)
    x[:, ::4] *= 1e-4  # far below a step
    wanted = input_gradient(model, x, None)
    store: Any = ActivationStore(model, Auto(1000, max_noise=0.1), min_bytes=0)
    store.compile(backend="aot_eager")
    store._controller.resume({"plan": None, "noise": {"block": 0.0}}, None)
    if name in DECIDE_IN_ONE_OPERATOR:
        with pytest.raises(CapacityError):
            input_gradient(model, x, store)
        return
    check_same(input_gradient(model, x, store), wanted)
    assert store.graph_plan.encoded > 0


MODULES = {f"blocks.{number}": 1e-6 for number in range(6)}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_budgets_are_kept(backend: str) -> None:
    """Counted by the allocator: payloads, and what encoding needs."""
    plain, *rows = measured("Heads", backend, (0.6, 0.1), "pages", **MODULES)
    *_, exact = measured("Heads", backend, (0.1,), "pages")
    for row in rows:
        assert row["peak"] <= row["budget"] + OUTSIDE_NBYTES
        assert row["plan"]["predicted_peak"] <= row["budget"]
        if row["plan"]["encoded"]:
            assert row["grads"] != plain["grads"]
        elif backend == "aot_eager":  # Inductor may add numbers in another order
            assert row["grads"] == plain["grads"]
    assert any(row["plan"]["encoded"] for row in rows)
    assert rows[-1]["budget"] <= exact["budget"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("seed", [1, 8, 14, 16, 18])
def test_budgets_of_random_models_are_kept(seed: int, backend: str) -> None:
    _, *rows = measured(str(seed), backend, (0.7, 0.5, 0.1), "system", **MODULES)
    for row in rows:
        assert row["peak"] <= row["budget"] + OUTSIDE_NBYTES
        assert row["plan"]["predicted_peak"] <= row["budget"]


def test_without_modules_that_may_lose_gradients_are_bit_for_bit() -> None:
    wanted, budget = plain(Deep), least(Deep)
    for noise in ({}, {"blocks.0": None, "head": None}, {"somewhere.else": 0.0}):
        model, x, store = planned(Deep, budget, noise)
        check_same(gradients(model, x, store), wanted)
        assert store.graph_plan.encoded == store.graph_plan.noise == 0


@pytest.mark.usefixtures("encodes_all")
def test_modules_that_may_not_lose_stay_exact() -> None:
    noise = {"blocks.1": 1e-6, "blocks.2": 1e-6, "blocks.2.up": None, "blocks.2.norm": None}
    model, x, store = planned(Deep, "20MiB", noise)
    gradients(model, x, store)
    encoded = {site.site.split("[")[0] for site in store.report().sites if site.decision == "int8"}
    assert {"blocks.1.up", "blocks.2.down"} <= encoded
    assert all(name.startswith("blocks.1") or name in ("blocks.2", "blocks.2.down") for name in encoded)
    assert store.graph_plan.noise == 2e-6


def test_a_state_has_the_noise_and_needs_no_eager_steps() -> None:
    model, x, store = planned(Deep, "30MiB")
    wanted = gradients(model, x, store)
    state = store.state_dict()
    other, _, resumed = planned(Deep, "30MiB", None)
    assert resumed._controller.board is not None
    assert resumed.state_dict() != state
    resumed.load_state_dict(state)
    check_same(gradients(other, x, resumed), wanted)
    assert resumed.graph_plan == store.graph_plan
    fresh, _, unmeasured = planned(Deep, "30MiB", None)
    resumed.load_state_dict(unmeasured.state_dict())  # a state without noise changes nothing behind the eager steps
    check_same(gradients(other, x, resumed), wanted)
    again, _, measuring = planned(Deep, "30MiB", None)
    measuring.load_state_dict(unmeasured.state_dict())
    assert measuring._controller.board is not None
    assert fresh is not again


def test_a_model_that_is_compiled_again_keeps_what_was_measured() -> None:
    model, x, store = planned(Deep, "30MiB", None)
    store.compile(backend="aot_eager")
    assert store._controller.board is not None
    store._controller.resume({"plan": None, "noise": NOISE}, None)
    wanted = gradients(model, x, store)
    torch._dynamo.reset()
    store.compile(backend="aot_eager")
    assert store._controller.board is None
    assert store._controller.graph.noise == NOISE
    check_same(gradients(model, x, store), wanted)


def test_where_eager_steps_do_not_fit_the_plan_is_exact(caplog: pytest.LogCaptureFixture) -> None:
    model, x, store = planned(Mlp, 1000, None, min_bytes=0)
    with caplog.at_level(logging.WARNING, "actstore"), pytest.raises(CapacityError, match="compiled model"):
        [gradients(model, x, store) for _ in range(MAX_EAGER_STEPS)]
    assert "the plan of the compiled model will be exact: its noise was not measured: " in caplog.text
    assert store.graph_plan is None


class Glued(nn.Module):
    """Blocks that read halves of one product: PyTorch saves one of them, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(64, 512), nn.Linear(256, 64)]) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in self.blocks:
            a, b = up(x).chunk(2, -1)
            x = x + down(a * torch.sigmoid(b))
        return x


BATCHES[Glued] = lambda: torch.randn(1024, 64)


@pytest.mark.usefixtures("encodes_all")
def test_a_plan_has_the_payloads_of_its_own_partition() -> None:
    """The search has looked at others, which save other parts of a result."""
    model, x, store = planned(Glued, "20MiB", {f"blocks.{number}": 1e-6 for number in range(8)}, min_bytes=0)
    wanted = gradients(make(Glued)[0], x)
    assert 0 < error(gradients(model, x, store), wanted) < 0.01
    stored = sum(site.stored_bytes for site in store.report().sites if site.decision == "int8")
    assert stored <= store.graph_plan.encoded <= 1.1 * stored


def test_wrong_options_are_refused_before_the_eager_steps() -> None:
    store = ActivationStore(make(Mlp)[0], Auto("1MiB", max_noise=0.1))
    with pytest.raises(TypeError):
        store.compile(backend="aot_eager", foo=1)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_compiled_store_is_freed_with_its_last_reference(noise: float) -> None:
    torch._dynamo.reset()
    model, x = make(Mlp)
    store: Any = ActivationStore(model, Auto("100MiB", max_noise=noise))
    store.compile(backend="aot_eager")
    if noise:
        store._controller.resume({"plan": None, "noise": NOISE}, None)
    gradients(model, x, store)
    weak = ref(store)
    with gc_off():
        del store
        assert weak() is None


def test_an_eager_step_that_runs_out_of_memory_runs_again() -> None:
    model, x, store = planned(Deep, "30MiB", None)
    calls = []

    @store
    def step() -> Tensor:
        calls.append(1)
        loss: Tensor = model(torch.randn_like(x)).square().mean()
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return loss

    for _ in range(4):
        step().backward()
        model.zero_grad()
    assert len(calls) == 5


def test_a_state_is_for_a_store_that_has_compiled(caplog: pytest.LogCaptureFixture) -> None:
    state = planned(Deep, "30MiB")[2].state_dict()
    store = ActivationStore(make(Deep)[0], Auto("30MiB", max_noise=0.1))
    with caplog.at_level(logging.WARNING, "actstore"):
        store.load_state_dict(state)
    assert "the state is of a compiled model, and compile() was not called before load_state_dict()" in caplog.text


def test_errors_in_eager_steps_leave_nothing() -> None:
    model, x, store = planned(Deep, "30MiB", None)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), store:
            _ = model(x).sum() / (1 // 0)
        check_drained(store)
        gradients(model, x, store)
    assert store._controller.board is not None
    store.close()


def unit(name: str, kind: str, noise: dict[str, float], *parts: str) -> Unit:
    return Unit(name, kind, 1, parts, True, noise)


def test_the_modules_that_may_lose_are_those_with_most_bytes_for_their_noise() -> None:
    def figures(decision: str, error: float, **saved: int) -> UnitFigures:
        parts = {name.replace("own", ""): UnitBytes(saved=nbytes) for name, nbytes in saved.items()}
        return UnitFigures(decision, 1.0, 1.0, parts, error=error)

    block = {"keep": figures("keep", 0.0, a=100, b=100), "int8": figures("int8", 0.5, a=100, b=100)}
    units = (
        unit("one", "block", {"": 0.0, "a": 0.02, "b": 0.2}, "a", "b"),
        unit("two", "block", {"": 0.0, "a": 0.06, "b": inf}, "a", "b"),
        unit("three", "exact", {"": 0.1}),
        unit("four", "block", {}, "a", "b"),
        unit("", "block", {"": 0.0, "a": 0.0, "b": 0.0}, "a", "b"),
    )
    kinds = {"block": block, "exact": {"keep": figures("keep", 0.0, own=100)}}
    profile: Any = Profile(units, kinds, None, 0.0, None, "", {})  # type: ignore[arg-type]
    found = lossy_modules(profile, 0.1)
    assert found.noise == {
        "one": None, "one.a": 0.01, "one.b": None, "two": None, "two.a": 0.03, "two.b": None, "three": None,
        "four": None, "four.a": None, "four.b": None,
    }  # fmt: skip
    assert lossy_modules(profile, 0.3).noise["one.b"] == 0.1
    whole = lossy_modules(profile, 0.2).noise["one"]
    assert whole == pytest.approx(0.11), "its own payloads were exact: what it reads may be of any part"
    assert lossy_modules(profile, 0.035).noise["two.a"] is None
    assert found.any
    assert not LossyModules({"one": None}).any


def test_a_module_counts_to_the_next_one_around_it() -> None:
    lossy = LossyModules({"blocks.1": 0.5, "blocks.1.attn": 0.25, "blocks.2": None, "blocks.2.mlp": 0.125})
    names = "blocks.1.mlp.0", "blocks.1.attn.q", "blocks.2", "blocks.2.mlp", "head", ""
    assert [lossy.of(name) for name in names] == ["blocks.1", "blocks.1.attn", None, "blocks.2.mlp", None, None]
    assert lossy.noise_of(["blocks.1.attn", "blocks.1.attn.q", "blocks.2.mlp.0", "head"]) == 0.375
    assert lossy.sizes(torch.empty(3, 129)) == (387, 12)  # two groups in each row
    assert lossy.sizes(torch.empty(387)) == (387, 8)  # four in the one row
    assert LossyModules({"a": 1.0}).identity == LossyModules({"a": 2.0}).identity != LossyModules({"a": None}).identity


@pytest.mark.slow
def test_inductors_caches_keep_the_plan_and_miss_for_other_modules() -> None:
    budget = least(Deep) - 1
    with fresh_cache():
        plans = []
        for noise in (NOISE, dict.fromkeys(NOISE, 2e-06), {**NOISE, "blocks.0": None}):
            counters.clear()
            model, x, store = planned(Deep, budget, noise, backend="inductor")
            for _ in range(2):
                gradients(model, x, store)
                check_drained(store)
            plans.append((counters["aot_autograd"]["autograd_cache_hit"], store.graph_plan))
    assert [hits for hits, _ in plans] == [0, 1, 0]
    assert plans[0][1] == plans[1][1]
    assert plans[0][1].encoded > 0


@pytest.mark.slow
def test_a_plan_encodes_and_lets_tensors_wait_in_a_file() -> None:
    noise = {"blocks.0": 1e-6, "blocks.1": 1e-6}
    wanted = plain(Deep, backend="inductor")
    tiers: list[Disk | Window] = [Disk(budget="1GiB"), Window("1MiB")]
    model, x, store = planned(Deep, least(Deep) - 1, noise, backend="inductor", tiers=tiers)
    for _ in range(3):
        assert 0 <= error(gradients(model, x, store), wanted) < 0.01
        check_drained(store)
    assert store.graph_plan.predicted_peak <= store.graph_plan.budget
