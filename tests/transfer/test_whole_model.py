"""Whole models on the simulated accelerator: the same gradients bit for bit, each operator's accesses ordered."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # else the first operator under a mode imports it, which leaves frames of ours in cycles
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from actstore import ActivationStore, Disk, Host, Verify, Window
from actstore.errors import PolicyError
from tests.autograd import random_models
from tests.autograd.checks import Step, check_drained, check_same, train_step
from tests.autograd.models import build
from tests.autograd.random_training import WAYS, arguments_of, policies, train
from tests.autograd.test_random_models import may_refuse, train_unless_refused
from tests.simulation import TraceOperators, simulation
from tests.transfer.programs import PAGE, small_memory

SETTINGS = {
    "host": ("raw @ host", [], []),
    "a small window": ("raw @ host", [Window(PAGE)], []),
    "a small budget": ("raw @ host", [Host(4 * PAGE), Window(when_full="keep")], []),
    "late lengths": ("expack @ host", [], []),
    "host > disk": ("raw @ host > disk", [Host(2 * PAGE), Window(2 * PAGE)], []),
    "verify": ("raw @ host", [], [Verify()]),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_memory(monkeypatch)


def steps(name, seed, disk_folder, settings):
    """Three steps under a store, on the device of a seed; what autograd finds alone, as often."""
    model, batch = build(name)
    wanted = train_step(model, batch)
    with simulation(seed) as device, TraceOperators(device):
        policy, tiers, observe = settings
        device.scheduler.host_may_wait = "disk" in policy
        store = ActivationStore(model, policy, min_bytes=0, tiers=[Disk(disk_folder), *tiers], observe=observe)
        for _ in range(3):
            check_same(train_step(model, batch, store), wanted)
        device.scheduler.host_may_wait = True
        check_drained(store)
        assert store.report().live_bytes == 0
        store.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_gradients_are_those_of_plain_autograd(name, settings, seed, disk_folder):
    steps(name, seed, disk_folder, SETTINGS[settings])


@pytest.mark.parametrize("seed", range(8))
def test_two_graphs_at_once(seed):
    model, batch = build("transformer")
    wanted = train_step(model, batch)
    with simulation(seed) as device, TraceOperators(device):
        store = ActivationStore(model, "raw @ host", min_bytes=0, tiers=[Window(2 * PAGE)])
        losses = []
        for _ in range(2):
            torch.manual_seed(1)
            with store:
                losses.append(model(*batch).float().square().mean())
        for loss in losses:
            model.zero_grad()
            loss.backward()
            grads = {name: parameter.grad for name, parameter in model.named_parameters()}
            check_same(Step(loss.detach(), grads), wanted)
        losses.clear()
        del loss
        device.scheduler.host_may_wait = True
        check_drained(store)
        store.close()


@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    forest=st.lists(random_models.trees(), min_size=1, max_size=6),
    data=st.data(),
    way=st.sampled_from(WAYS),
    autocast=st.booleans(),
    options=st.fixed_dictionaries(
        {"min_bytes": st.sampled_from([0, 200])},
        optional={
            "window": st.sampled_from([1, PAGE, 4 * PAGE]),
            "host_budget": st.sampled_from([0, 2 * PAGE]),
            "when_full": st.sampled_from(["keep", "spill"]),
            "verify": st.just(True),
        },
    ),
    seed=st.integers(0, 10**6),
)
def test_random_models(
    forest: list[random_models.Tree],
    data: st.DataObject,
    way: str,
    autocast: bool,
    options: dict[str, Any],
    seed: int,
    disk_folder: Path,
) -> None:
    try:
        with simulation() as device, TraceOperators(device):  # under a mode operators may be cut up in other ways
            wanted = train(random_models.build(forest, torch.float32), None, way, torch.float32, autocast)
    except (RuntimeError, UserWarning):  # no model that can be trained so
        reject()
    model = random_models.build(forest, torch.float32)
    policy = data.draw(policies(model))
    with simulation(seed) as device, TraceOperators(device):
        device.scheduler.host_may_wait = "disk" in policy or "verify" in options
        try:
            store = ActivationStore(model, policy, **arguments_of(options, disk_folder))
        except PolicyError:
            reject()
        refused = may_refuse(forest, policy)
        found = train_unless_refused(model, store, way, dtype=torch.float32, autocast=autocast, refused=refused)
        if found is not None:
            check_same(found, wanted)
        device.scheduler.host_may_wait = True
        check_drained(store)
        store.close()
