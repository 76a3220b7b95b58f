"""Stores around the forwards of code that knows of none."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from actstore import ActivationStore
from actstore.errors import ConfigError, PolicyError
from actstore.run.models import ScriptStores
from actstore.run.settings import Settings


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(32, 4)
        self.failure = None
        self.checkpoints = False

    def forward(self, x):
        if self.failure is not None:
            raise self.failure
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        return self.head(x)


@pytest.fixture
def start():
    """A function that starts stores, which end with the test."""
    started = []

    def make(policy="recompute", first=None, **options):
        lines = []
        stores = ScriptStores(Settings(policy=policy, min_bytes="0", **options), lines.append, first)
        stores.lines = lines
        stores.start()
        started.append(stores)
        return stores

    yield make
    for stores in started:
        stores.stop()


def build():
    torch.manual_seed(0)
    return Model(), torch.randn(16, 32)


def gradients(model, run):
    model.zero_grad()
    run().square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def equal(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("policy", ["recompute", "raw @ disk", "body.1 : recompute; * : raw @ disk", "keep"])
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
def test_gradients_are_those_without_a_store(start, policy, parts):
    model, x = build()

    def run():
        return model.head(model.body(x)) if parts else model(x)

    expected = gradients(model, run)
    stores = start(policy)
    for _ in range(2):
        assert equal(gradients(model, run), expected)
    [trained] = stores.trained
    assert (trained.name, trained.steps) == ("Model", 2)
    names = {site.site.partition("[")[0] for site in trained.store.report().sites}
    assert "head" in names
    assert any(name.startswith("body.1") for name in names), "names are those of the whole model"
    assert trained.store.report().saved_bytes > 3 * x.nbytes


def test_forwards_before_one_backward_are_one_step(start):
    model, x = build()
    [saved] = _saved(start("keep"), lambda: model(x).mean().backward())
    stores = start("keep")
    (model(x) + model(2 * x)).mean().backward()
    model(x).mean().backward()
    assert stores.trained[0].steps == 2
    (model(x) + model(2 * x)).mean().backward()
    assert saved < stores.trained[0].store.report().saved_bytes


def _saved(stores, run):
    run()
    stores.stop()
    return [each.report.saved_bytes for each in stores.trained]


def test_a_forward_that_had_no_backward_is_a_step_of_its_own(start):
    model, x = build()
    stores = start("keep")
    for _ in range(3):
        model(x)  # its graph is freed at once
    assert stores.trained[0].steps == 3


def test_evaluation_frozen_models_and_losses_get_no_store(start):
    model, x = build()
    frozen = copy.deepcopy(model).requires_grad_(False)
    stores = start()
    with torch.no_grad():
        model(x)
    frozen(x.requires_grad_()).mean().backward()
    model.eval()(x).mean().backward()
    nn.MSELoss()(torch.ones(2, requires_grad=True), torch.zeros(2)).backward()
    torch.func.grad(lambda y: torch.func.functional_call(model.train(), {}, y).mean())(x.detach())
    assert stores.trained == []


def test_a_store_of_the_script_comes_first(start):
    model, x = build()
    stores = start()
    store = ActivationStore(model, "recompute", min_bytes=0)
    with store:
        loss = model(x).mean()
    loss.backward()
    assert stores.trained == []
    assert store.report().held_bytes < store.report().saved_bytes


def test_layers_that_a_checkpoint_runs_again_are_not_entered(start):
    model, x = build()
    model.checkpoints = True
    expected = gradients(model, lambda: model(x))
    stores = start("raw @ disk")
    assert equal(gradients(model, lambda: model(x)), expected)
    assert [each.steps for each in stores.trained] == [1]


def test_each_model_has_a_store(start):
    (one, x), (other, _) = build(), build()
    expected = gradients(one, lambda: other(one(x).repeat(1, 8)))
    stores = start("raw @ disk")
    assert equal(gradients(one, lambda: other(one(x).repeat(1, 8))), expected)
    assert [each.steps for each in stores.trained] == [1, 1]
    assert stores.lines == 2 * ["Model: the policy is raw @ disk"]


def test_a_module_that_contains_itself_is_entered_once(start):
    class Nested(Model):
        depth = 0

        def forward(self, x):
            if not self.depth:
                self.depth = 1
                x = self(x)[:, :1] + x
                self.depth = 0
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Nested(), torch.randn(16, 32)
    expected = gradients(model, lambda: model(x))
    stores = start("raw @ disk")
    assert equal(gradients(model, lambda: model(x)), expected)
    assert stores.trained[0].steps == 1


@pytest.mark.parametrize("failure", [ValueError("batch"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_forward_that_fails_leaves_the_store(start, failure):
    model, x = build()
    expected = gradients(model, lambda: model(x))
    start("raw @ disk")
    gradients(model, lambda: model(x))
    model.failure = failure
    with pytest.raises(type(failure)):
        model(x)
    model.failure = None
    try:
        raise RuntimeError("outer")  # a model that is called while an error is handled has not failed
    except RuntimeError:
        assert equal(gradients(model, lambda: model(x)), expected)
    assert equal(gradients(model, lambda: model(x)), expected)


def test_a_model_that_the_script_drops_is_freed_when_the_next_one_trains(start):
    model, x = build()
    stores = start("raw @ disk")
    model(x).mean().backward()
    dropped, (other, _) = weakref.ref(model), build()
    del model
    other(x).mean().backward()
    gc.collect()
    assert dropped() is None
    assert [each.report is not None for each in stores.trained] == [True, False]


def test_models_by_turns_keep_their_steps(start):
    (one, x), (other, _) = build(), build()
    stores = start("raw @ disk")
    for _ in range(2):
        one(x).mean().backward()
        other(x).mean().backward()
    assert [each.steps for each in stores.trained] == [2, 2]
    assert [each.store is not None for each in stores.trained] == [True, True]


def test_only_models_of_the_named_classes(start):
    model, x = build()
    stores = start(models=("Other",))
    model(x).mean().backward()
    assert stores.trained == []


def test_a_policy_that_does_not_fit_the_model_is_refused(start):
    model, x = build()
    stores = start("nothing.here : int8")
    with pytest.raises(PolicyError, match=r"nothing\.here") as found:
        model(x)
    assert stores.refusal is found.value


def test_plans_need_the_whole_forward(start):
    model, x = build()
    start("auto(1GiB)")
    model.body(x).mean().backward()
    with pytest.raises(ConfigError, match="parts of Model one after the other"):
        model.head(x)


def test_a_line_of_figures(start):
    model, x = build()
    stores = start("raw @ disk", every=2)
    for _ in range(5):
        model(x).mean().backward()
    assert [line.partition(":")[0] for line in stores.lines] == ["Model", "Model, step 2", "Model, step 4"]
    assert "steps/s" in stores.lines[1]
    assert "KiB" in stores.lines[1]


@pytest.mark.parametrize(("every", "expected_steps"), [(0, [1, 2, 3, 4, 10, 20]), (7, [1, 2, 3, 4, 7, 14, 21])])
def test_without_a_policy_few_steps_are_counted(start, every, expected_steps):
    """Among them are those of which `--every` shows the figures."""
    model, x = build()
    expected = gradients(model, lambda: model.head(model.body(x)))
    stores, counted = start("keep", every=every), []
    for _ in range(25):
        assert equal(gradients(model, lambda: model.head(model.body(x))), expected)
        counted.append(stores.trained[0].counted)
    assert list(dict.fromkeys(counted)) == expected_steps
    assert stores.trained[0].steps == 25
    names = {site.site.partition("[")[0] for site in stores.trained[0].store.report().sites}
    assert "head" in names, "all forwards of a counted step are"


def test_the_first_forward_can_run_again(start):
    model, x = build()
    expected = gradients(model, lambda: model(x=x))
    found = []

    def first(store, forward):
        forward().mean().backward()
        found.append(store.report().saved_bytes)
        model.zero_grad()

    stores = start("raw @ disk", first)
    for _ in range(2):
        assert equal(gradients(model, lambda: model(x=x)), expected)
    assert len(found) == 1
    assert stores.trained[0].steps == 2


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # PyTorch's own, which a run leaves out
def test_a_compiled_model(start):
    model, x = build()
    compiled = torch.compile(model, backend="aot_eager")
    expected = gradients(model, lambda: compiled(x))
    torch._dynamo.reset()
    stores = start("raw @ disk")
    assert equal(gradients(model, lambda: compiled(x)), expected)
    assert [each.steps for each in stores.trained] == [1]
    assert stores.trained[0].store.report().stored_bytes
