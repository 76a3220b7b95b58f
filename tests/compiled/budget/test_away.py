"""Plans of compiled models that let saved tensors wait in a tier."""

from __future__ import annotations

from functools import cache
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from actstore import ActivationStore, Auto, Disk, Window
from actstore.compiled.budget import lane
from actstore.errors import CapacityError
from actstore.plan.values import Grants
from actstore.session import compiling
from actstore.session.controllers import grants_of
from tests.autograd.checks import check_drained, check_same, gc_off
from tests.compiled.budget.test_budget import OUTSIDE_NBYTES, measured
from tests.compiled.models import BATCHES, Deep, compiled, gradients, make, plain

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself
MIB = 1 << 20
WIDTH = 256
DISK: list[Disk | Window] = [Disk(budget="1GiB"), Window("1MiB")]


@pytest.fixture(autouse=True)
def copies_take_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that plans are the same on each machine."""
    monkeypatch.setattr(compiling, "rates_alone", lambda *_: (1e9, 1e9))
    monkeypatch.setattr(compiling, "bytes_per_ms", lambda _: 1e9)
    monkeypatch.setattr(lane, "CALL_MS", 0.0)


class Fused(nn.Module):
    """Attention whose queries, keys and values are one product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.qkv:
            q, k, v = layer(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + seen.transpose(1, 2).flatten(2)
        return x


BATCHES[Fused] = lambda: torch.randn(16, 128, WIDTH)


def planned(
    kind: Any, budget: int, tiers: list[Disk | Window], backend: str = "aot_eager", **options: Any
) -> tuple[nn.Module, Tensor, Any]:
    torch._dynamo.reset()
    model, x = make(kind)
    store = ActivationStore(model, Auto(budget), tiers=tiers, **options)
    store.compile(backend=backend)
    return model, x, store


@cache
def least(kind: Any) -> int:
    """The least budget without a tier."""
    model, x, store = planned(kind, 1000, [])
    with pytest.raises(CapacityError) as refusal, store:
        model(x)
    found: int = refusal.value.facts["least"]
    return found


def test_gradients_bit_for_bit_below_what_recomputation_needs() -> None:
    wanted, budget = plain(Deep), least(Deep) - 1
    model, x, store = planned(Deep, budget, DISK)
    with gc_off():
        for _ in range(3):
            check_same(gradients(model, x, store), wanted)
            check_drained(store)
    plan = store.graph_plan
    assert plan.predicted_peak <= budget
    assert plan.away > 0
    assert "wait in the tier 'disk'" in str(plan)
    assert "MiB in disk" in str(plan)
    report = store.report()
    assert {medium.tier for medium in report.media} == {"disk"}
    moved = [site for site in report.sites if site.decision == "raw @ disk"]
    assert {site.note for site in moved} == {""}
    assert 0.85 * plan.away <= sum(site.stored_bytes for site in moved) <= plan.away
    assert type(plan).from_dict(plan.to_dict()) == plan
    store.close()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_queries_keys_and_values_of_one_product_leave_as_one(backend: str) -> None:
    wanted = plain(Fused, backend=backend)
    model, x, store = compiled(Fused, "raw @ disk", backend=backend)
    check_same(gradients(model, x, store), wanted)
    whole = 16 * 128 * 3 * WIDTH * 4
    assert [site.stored_bytes for site in store.report().sites].count(whole) == 2
    check_drained(store)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["Deep", pytest.param("16", marks=pytest.mark.slow)])
def test_budgets_are_kept(kind: str, backend: str) -> None:
    """Counted by the allocator, the engine's buffers included."""
    plain, *rows = measured(kind, backend, (0.45, 0.1), "pages", "1GiB")
    for row in rows:
        assert row["peak"] <= row["budget"] + OUTSIDE_NBYTES
        assert row["plan"]["predicted_peak"] <= row["budget"]
        if backend == "aot_eager":
            assert row["grads"] == plain["grads"]
    _, *without = measured(kind, backend, (0.1,), "pages")
    if kind == "Deep":
        assert any(row["plan"]["away"] for row in rows)
        assert rows[-1]["budget"] < without[-1]["budget"]


def test_nothing_leaves_for_a_disk_that_is_too_small() -> None:
    model, x, store = planned(Deep, least(Deep) - 1, [Disk(budget=1000)])
    with pytest.raises(CapacityError), store:
        model(x)


def test_a_plan_keeps_the_budget_of_the_disk() -> None:
    room = 17 * MIB
    model, x, store = planned(Deep, least(Deep) + 8 * MIB, [Disk(budget=room), DISK[1]])
    gradients(model, x, store)
    assert 0 < store.graph_plan.away <= room
    assert {medium.peak_bytes <= room for medium in store.report().media} == {True}


def test_backward_twice_two_forwards_and_an_error_leave_nothing() -> None:
    wanted = plain(Deep)
    model, x, store = planned(Deep, least(Deep) - 1, DISK, strict=True)
    with gc_off():
        with store:
            loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        check_same({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, wanted)
        del loss
        check_drained(store)
        model.zero_grad()
        with store:
            losses = [model(x).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward()
        check_same({name: p.grad / 2 for name, p in model.named_parameters() if p.grad is not None}, wanted)
        del loss, losses
        check_drained(store)
        with pytest.raises(ZeroDivisionError), store:
            _ = model(x).sum() / (1 // 0)
        check_drained(store)
        check_same(gradients(model, x, store), wanted)


def test_the_window_is_the_plans_or_the_users() -> None:
    budget = least(Deep) + 8 * MIB
    for tiers, most in ((DISK[:1], 16 * MIB), (DISK, MIB)):
        model, x, store = planned(Deep, budget, tiers)
        for _ in range(2):
            gradients(model, x, store)
        engine = next(iter(store._store._places.values())).engine
        assert engine.window_nbytes == store.graph_plan.window <= most


@pytest.mark.slow
def test_inductors_caches_keep_the_plan_and_the_tier() -> None:
    budget = least(Deep) - 1
    with fresh_cache():
        wanted, plans = plain(Deep, backend="inductor"), []
        for tiers in (DISK, DISK, [Disk(budget="2GiB"), DISK[1]]):
            counters.clear()
            model, x, store = planned(Deep, budget, tiers, "inductor")
            for _ in range(2):
                check_same(gradients(model, x, store), wanted)
                check_drained(store)
            plans.append((counters["aot_autograd"]["autograd_cache_hit"], store.graph_plan))
    assert [hits for hits, _ in plans] == [0, 1, 0]
    assert plans[0][1] == plans[1][1]
    assert plans[0][1].away > 0


def test_a_forward_outside_of_the_store_waits_in_memory() -> None:
    wanted = plain(Deep)
    model, x, store = planned(Deep, least(Deep) - 1, DISK)
    check_same(gradients(model, x), wanted)
    assert not store.report().media


def test_the_tier_is_host_memory_beside_an_accelerator_and_else_a_disk_that_is_granted() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    every, none = Grants(1, None, 7, 0.0), Grants(1, 0, 0, 0.0)
    assert compiling.tier_of(every, Window(), gpu) == ("host", inf)
    assert compiling.tier_of(Grants(1, 5, 7, 0.0), Window(), gpu) == ("host", 5)
    assert compiling.tier_of(Grants(1, 0, 7, 0.0), Window(), gpu) == ("disk", 7)
    assert compiling.tier_of(every, Window(), cpu) == ("disk", 7)
    assert compiling.tier_of(every, Window(when_full="spill"), gpu) is None
    assert compiling.tier_of(grants_of(Auto("1GiB"), {"disk": Disk()}, 0), Window(), cpu) is None, (
        "no budget of the disk"
    )
    assert compiling.tier_of(none, Window(), gpu) is compiling.tier_of(none, Window(), cpu) is None
    assert compiling.windows_of(Window("48MiB"), gpu) == (32 * MIB, 48 * MIB)
