"""Errors of payloads inside of graphs, measured in the steps that a store samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from actstore import ActivationStore, SampleErrors, Trace
from actstore.errors import AccuracyError
from tests.autograd.checks import check_drained, check_same, gc_off
from tests.compiled.models import AttentionNet, Convolutions, Mlp, ReluNet, gradients, make

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself
EACH = SampleErrors(every=1)


def sampled(
    kind: Any, policy: str, *observe: SampleErrors, backend: str = "aot_eager"
) -> tuple[nn.Module, Tensor, ActivationStore]:
    torch._dynamo.reset()
    model, x = make(kind)
    store = ActivationStore(model, policy, observe=observe, min_bytes=0)
    store.compile(backend=backend)
    return model, x, store


class Saved(nn.Module):
    """It saves one tensor, the product, for backward: the loss is its cube."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        return h * h * h


@pytest.mark.parametrize("policy", ["int8", "int4", "int5", "int8(affine)", "int8(group=32)", "int8 @ disk"])
def test_errors_are_those_of_the_same_payload_outside_of_graphs(policy: str) -> None:
    """A graph saves other tensors than an eager step; of this model both save the product."""
    found = {}
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Saved(), torch.randn(16, 64)
        store = ActivationStore(model, policy, observe=[EACH], min_bytes=0)
        if compiles:
            store.compile(backend="aot_eager")
        with store:
            loss = model(x).sum()
        loss.backward()
        sites = [site for site in store.report().sites if site.error is not None and site.saved_bytes == 16 * 96 * 4]
        found[compiles] = sites[0].error
        del loss
        check_drained(store)
    graph, eager = found[True], found[False]
    assert graph is not None
    assert eager is not None
    assert graph.relative == pytest.approx(eager.relative, rel=1e-6)
    assert graph.largest == pytest.approx(eager.largest, rel=1e-6)
    assert (graph.decision, graph.step, graph.lost) == (eager.decision, 1, 0)
    assert graph.payloads == graph.measured == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [Mlp, ReluNet, AttentionNet, Convolutions])
def test_samples_change_nothing_and_every_lossy_site_has_an_error(kind: Any, backend: str) -> None:
    found = []
    for observe in ([], [EACH]):
        model, x, store = sampled(kind, "int8", *observe, backend=backend)
        with gc_off():
            for _ in range(2):
                found.append(gradients(model, x, store))
                check_drained(store)
        encoded = [site for site in store.report().sites if site.decision == "int8" and site.stored_bytes]
        assert encoded
        for site in encoded:
            assert (site.error is not None) == bool(observe)
            assert site.error is None or 1e-4 < site.error.relative < 0.02
    for each in found[1:]:
        check_same(each, found[0])


def test_only_some_steps_are_sampled_and_a_large_error_is_raised() -> None:
    model, x, store = sampled(Mlp, "int8", SampleErrors(every=3))
    steps = []
    for _ in range(5):
        gradients(model, x, store)
        steps.append({site.error.step for site in store.report().sites if site.error is not None})
    assert steps == [{1}, {1}, {1}, {4}, {4}]
    model, x, store = sampled(Mlp, "int8", SampleErrors(every=3, fail=1e-6))
    gradients(model, x, store)
    with pytest.raises(AccuracyError, match="int8"):
        gradients(model, x, store)


def test_without_a_wish_nothing_is_sampled() -> None:
    for observe in ([], [SampleErrors(every=0)]):
        model, x, store = sampled(Mlp, "int8", *observe)
        gradients(model, x, store)
        assert {site.error for site in store.report().sites if site.decision == "int8"} == {None}
    model, x, store = sampled(Mlp, "expack", EACH)
    gradients(model, x, store)
    assert {site.error for site in store.report().sites} == {None}


def test_a_forward_outside_of_the_store_is_not_sampled() -> None:
    model, x, store = sampled(Mlp, "int8", EACH)
    wanted = gradients(model, x)
    assert not store.report().sites
    check_same(gradients(model, x, store), wanted)


def test_a_trace_has_the_errors() -> None:
    torch._dynamo.reset()
    model, x = make(Mlp)
    store = ActivationStore(model, "int8", observe=[EACH, Trace()], min_bytes=0)
    store.compile(backend="aot_eager")
    for _ in range(2):
        gradients(model, x, store)
    sites = [site for site in store.report().sites if site.error is not None]
    measured = [event for event in store.trace.events() if event.kind == "measure"]
    assert len(measured) == 2 * len(sites) > 0
    assert {event.step for event in measured} == {1, 2}


def test_regions_of_one_model_and_sizes_that_change() -> None:
    torch._dynamo.reset()
    model, x = make(Mlp)
    store = ActivationStore(model, "int8", observe=[EACH], min_bytes=0)
    for block in model.blocks:  # type: ignore[union-attr]
        store.compile(block, backend="aot_eager", dynamic=True)
    for size in (32, 48):
        with store:
            loss = model(x[:1].expand(size, -1)).square().mean()
        loss.backward()
        assert all(site.error is None or site.error.measured for site in store.report().sites)


@pytest.mark.slow
def test_inductors_caches_know_whether_a_graph_samples() -> None:
    with fresh_cache():
        hits = []
        for observe in ([], [EACH], [EACH], []):
            counters.clear()
            model, x, store = sampled(Mlp, "int8", *observe, backend="inductor")
            gradients(model, x, store)
            errors = [site.error for site in store.report().sites if site.decision == "int8" and site.stored_bytes]
            assert errors
            assert all((error is not None) == bool(observe) for error in errors)
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 0, 1, 1]
