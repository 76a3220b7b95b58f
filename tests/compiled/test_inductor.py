"""Inductor: values, bytes, and its caches."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from actstore import ActivationStore
from actstore.compiled import edit
from actstore.compiled.arrange import channels_last_nodes
from actstore.compiled.graph import name_of
from tests.autograd.checks import check_drained, check_same
from tests.compiled.models import (
    AttentionNet,
    Convolutions,
    FusedAttention,
    Mlp,
    ReluNet,
    compiled,
    error,
    gradients,
    make,
    plain,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the compiler about itself


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [Mlp, ReluNet, AttentionNet, Convolutions])
def test_int8_and_keep(kind: type[nn.Module]) -> None:
    wanted = plain(kind, backend="inductor")
    model, x, store = compiled(kind, "keep", backend="inductor")
    check_same(gradients(model, x, store), wanted)
    assert store.report().held_bytes == store.report().saved_bytes > 0
    torch._dynamo.reset()
    model, x, store = compiled(kind, "int8", backend="inductor")
    for _ in range(2):
        assert 0 < error(gradients(model, x, store), wanted) < 0.02
        check_drained(store)
    report = store.report()
    assert report.stored_bytes > 0
    assert report.held_bytes < 0.55 * report.saved_bytes


def test_no_loop_divides_to_find_the_group_of_an_element() -> None:
    for kind in (FusedAttention, Mlp):
        torch._dynamo.reset()
        model, x, store = compiled(kind, "int8", backend="inductor")
        _, codes = run_and_get_code(gradients, model, x, store)
        assert len(codes) == 2
        assert all("int8_t*" in code and "div_floor_integer" not in code for code in codes)


def test_images_are_encoded_in_the_order_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor lays them out with the channels last, and masks of them. Loops that encode rows would transpose them."""
    found: list[set[Any]] = []
    graphs: list[torch.fx.Graph] = []

    def watched(forward: torch.fx.GraphModule) -> set[Any]:
        graphs.append(forward.graph)
        found.append(channels_last_nodes(forward))
        return found[-1]

    monkeypatch.setattr(edit, "channels_last_nodes", watched)
    for policy in ("int8", "raw @ disk", "int8 @ disk"):
        torch._dynamo.reset()
        wanted = plain(Convolutions, backend="inductor")
        torch._dynamo.reset()
        model, x, store = compiled(Convolutions, policy, backend="inductor")
        assert error(gradients(model, x, store), wanted) <= 0.02 * (policy != "raw @ disk")
        assert any("relu" in node.name for node in found[-1])
        masks = [node for node in graphs[-1].nodes if name_of(node) == "le"]
        assert found[-1].issuperset(masks)
        assert (len(masks) == 2) == (policy != "raw @ disk")
    torch._dynamo.reset()
    gradients(*compiled(Mlp, "int8", backend="inductor"))
    assert found[-1] == set()
    count = len(found)
    torch._dynamo.reset()
    gradients(*compiled(Convolutions, "int8"))
    assert len(found) == count, "no compiler turns them"


def figures(store: ActivationStore) -> list[Any]:
    report = store.report()
    return [(s.site, s.decision, s.note, s.saved_bytes, s.stored_bytes, s.held_bytes) for s in report.sites]


@pytest.mark.parametrize("dynamic", [False, True])
def test_equal_policies_share_cached_code_and_other_policies_do_not(dynamic: bool) -> None:
    def run(policy: str) -> tuple[list[Any], dict[str, torch.Tensor], int]:
        torch._dynamo.reset()
        counters.clear()
        model, x, store = compiled(Mlp, policy, backend="inductor", dynamic=dynamic)
        grads = gradients(model, x, store)
        return figures(store), grads, counters["aot_autograd"]["autograd_cache_hit"]

    first, grads, hits = run("int8")
    assert hits == 0
    again, same, hits = run("int8")
    assert hits == 1
    assert again == first
    check_same(same, grads)
    _, _, hits = run("blocks.0 : int8; * : keep")
    assert hits == 0


PROCESS = """
import json, sys, torch
from torch._dynamo.utils import counters
from tests.compiled.models import Mlp, compiled, gradients
from tests.compiled.test_inductor import figures

model, x, store = compiled(Mlp, sys.argv[1], backend="inductor")
grads = [grad.double().sum().item() for grad in gradients(model, x, store).values()]
sites = sorted(row[:5] for row in figures(store))  # without held bytes: writes may still run
print(json.dumps([grads, sites, counters["aot_autograd"]["autograd_cache_hit"]]))
"""


def test_processes_share_the_cached_code_of_tiers_by_policy(tmp_path: Path) -> None:
    def run(policy: str) -> Any:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        made = subprocess.run(
            [sys.executable, "-c", PROCESS, policy], capture_output=True, text=True, env=env, check=True
        )
        return json.loads(made.stdout)

    grads, first, hits = run("raw @ disk")
    assert hits == 0
    assert sum(stored > 0 for *_, stored in first) > 3
    assert run("raw @ disk")[2] == 1
    again = run("raw @ disk")
    assert again[:2] == [grads, first]
    assert run("blocks.0 : int8 @ disk; * : raw @ disk")[2] == 0


def test_blocks_with_equal_rules_share_cached_code_under_their_own_names() -> None:
    model, x = make(Mlp)
    store = ActivationStore(model, "blocks.2 : int4; * : int8", min_bytes=0)
    for block in model.blocks:
        store.compile(block)
    gradients(model, x, store)
    stored = {site.site.partition("[")[0]: site.decision for site in store.report().sites if site.stored_bytes}
    for name, decision in [("blocks.0", "int8"), ("blocks.1", "int8"), ("blocks.2", "int4")]:
        assert {found for site, found in stored.items() if site.startswith(name)} == {decision}


def test_recompute() -> None:
    wanted = plain(Mlp, backend="inductor")
    model, x, store = compiled(Mlp, "blocks.* : recompute", backend="inductor")
    assert error(gradients(model, x, store), wanted) < 1e-6
    report = store.report()
    torch._dynamo.reset()
    model, x, store = compiled(Mlp, "keep", backend="inductor")
    gradients(model, x, store)
    assert report.held_bytes < store.report().held_bytes
    assert report.saved_bytes == store.report().saved_bytes


def test_backward_runs_twice() -> None:
    model, x, store = compiled(Mlp, "int8", backend="inductor")
    wanted = gradients(model, x, store)
    model.zero_grad()
    with store:
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    check_same({name: p.grad.clone() for name, p in model.named_parameters()}, wanted)
