"""Whatever the step does, everything is as it was found."""

import gc
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from actstore import ActivationStore, check_gradients
from actstore.errors import ConfigError
from actstore.rerun.state import ModelState
from actstore.session.entries import is_active
from tests.check.planted import Chatty


def found(model, *others):
    """All that may change, as values that can be compared."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield id(tensor), tensor._version, tensor.requires_grad, tensor.tolist()
        yield id(tensor.grad), None if tensor.grad is None else (tensor.grad._version, tensor.grad.tolist())
    for module in model.modules():
        names = ("training", "calls", "seen", "cache", "_forward_hooks", "_backward_hooks")
        yield sorted(vars(module)), [str(vars(module).get(name)) for name in names]
    yield random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002
    for other in others:
        yield str(other.state_dict())


class Training:
    """A step that changes everything, and raises where it is told to."""

    def __init__(self, raises=None):
        torch.manual_seed(0)
        self.model, self.raises = Chatty(), None
        self.x = torch.randn(8, 6)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=torch.tensor(0.1))
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self()
        self.model.eval()
        self.model(self.x).sum().backward()
        self.model.train()
        self.raises = raises

    def __call__(self):
        model = self.model
        model.layers[0].register_forward_hook(lambda *_: None)
        noise = random.random() + np.random.random()  # noqa: NPY002
        loss = model(self.x + noise).square().mean() * self.optimizer.param_groups[0]["lr"]
        loss = loss + sum(p.grad.sum() for p in model.parameters() if p.grad is not None)
        loss.backward()
        if self.raises == ("store" if is_active() else "plain"):
            raise KeyError("in the middle")
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.param_groups[0]["weight_decay"] += 0.5
        self.optimizer.zero_grad(set_to_none=False)
        model.layers[0].bias.requires_grad_(False)
        model.layers[2].eval()
        model.tail = nn.Identity()
        return loss

    def found(self):
        return list(found(self.model, self.optimizer, self.schedule))


def test_the_step_changes_all_that_is_looked_at():
    training = Training()
    before = training.found()
    training()
    assert all(a != b for a, b in zip(before[-3:], training.found()[-3:], strict=True))


@pytest.mark.parametrize("first", [False, True], ids=["trained", "first step"])
def test_all_is_as_it_was_found(first):
    training = Training()
    if first:  # the optimizer has no state yet, and gradients are missing
        training.optimizer.state.clear()
        training.model.zero_grad()
    before = training.found()
    store = ActivationStore(training.model, "raw", min_bytes=0)
    result = check_gradients(training, store, stateful=[training.schedule])
    assert result.equal, str(result)
    assert training.found() == before


@pytest.mark.parametrize("where", ["plain", "store"])
def test_all_is_as_it_was_found_after_an_exception(where):
    training = Training(raises=where)
    before = training.found()
    with pytest.raises(KeyError, match="in the middle") as info:
        check_gradients(training, ActivationStore(training.model, "raw", min_bytes=0), stateful=[training.schedule])
    assert training.found() == before
    assert bool(getattr(info.value, "__notes__", [])) == (where == "store")


def test_what_the_step_changes_unknown_to_all_leaves_no_verdict():
    training = Training()
    result = check_gradients(training, ActivationStore(training.model, "raw", min_bytes=0))
    assert result.verdict == "equal"  # a scheduler writes to its optimizer, which is known
    training.extra = torch.zeros(())

    def step():
        training.extra += 1
        return training() * training.extra

    assert check_gradients(step, ActivationStore(training.model, "raw")).verdict == "no verdict"


def test_graphs_from_before_can_still_run_backward():
    training = Training()
    with ActivationStore(training.model, "raw", min_bytes=0) as store:
        loss = training.model(training.x).sum()
    check_gradients(training, store)
    loss.backward()


def test_hooks_of_all_modules_are_gone():
    from torch.nn.modules import module
    from torch.optim import optimizer

    tables = (module._global_forward_hooks, module._global_forward_pre_hooks, optimizer._global_optimizer_pre_hooks)
    nn.Identity()(torch.ones(1))  # a store removes those that no graph needs any more
    before = [len(table) for table in tables]
    training = Training(raises="plain")
    with pytest.raises(KeyError):
        check_gradients(training, ActivationStore(training.model))
    assert [len(table) for table in tables] == before
    assert not any(p._post_accumulate_grad_hooks for p in training.model.parameters())


class Owner(nn.Module):
    """A module with generators of its own, and a dict that refuses to be cleared."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.torch, self.python, self.numpy = torch.Generator(), random.Random(0), np.random.default_rng(0)
        self.fixed = Fixed(a=torch.zeros(2))

    def forward(self, x):
        return self.linear(x) * (torch.rand((), generator=self.torch) + self.python.random() + self.numpy.random())

    def states(self):
        return self.torch.get_state().tolist(), self.python.getstate(), str(self.numpy.bit_generator.state)


class Fixed(dict):
    def clear(self):
        raise TypeError("fixed")


def test_generators_of_modules_are_put_back():
    model, x = Owner(), torch.randn(3, 4)
    before = model.states()
    result = check_gradients(lambda: model(x).sum(), ActivationStore(model, "recompute", min_bytes=0))
    assert result.equal, str(result)
    assert model.states() == before


@pytest.mark.parametrize("had", [False, True], ids=["none", "some"])
@pytest.mark.parametrize("how", ["stateful", "inputs", "not at all"])
def test_gradients_outside_of_the_model_are_put_back(how, had):
    torch.manual_seed(0)
    model, head, x = nn.Linear(4, 4), nn.Linear(4, 1), torch.randn(3, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)

    def step():
        loss = head(model(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach() + head.weight.grad.sum()

    if had:
        step()
    before = list(found(nn.Sequential(model, head), optimizer))[:-1]
    given = {"stateful": {"stateful": [optimizer]}, "inputs": {"inputs": head.parameters()}}.get(how, {})
    result = check_gradients(step, ActivationStore(model, "raw", min_bytes=0), **given)
    assert result.equal, str(result)
    after = list(found(nn.Sequential(model, head), optimizer))[:-1]
    assert after == before


@pytest.mark.parametrize("how", ["stateful", "model", "not at all"])
def test_optimizers_that_the_collector_does_not_list(how):
    """After ``gc.freeze()`` a step is put back wholly, or refused."""
    torch.manual_seed(0)
    model, head, x = nn.Linear(4, 4), nn.Linear(4, 1), torch.randn(3, 4)
    whole = nn.ModuleList([model, head])
    optimizer = torch.optim.Adam(whole.parameters(), lr=0.1)

    def step():
        loss = head(model(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach() + head.weight.grad.sum()

    step()
    before = list(found(whole, optimizer))[:-1]
    gc.freeze()
    store = ActivationStore(whole if how == "model" else model, "raw", min_bytes=0)
    given = {"stateful": [optimizer]} if how == "stateful" else {}
    if how == "not at all":
        with pytest.raises(ConfigError, match=r"Adam: .*gc\.unfreeze"):
            check_gradients(step, store)
    else:
        result = check_gradients(step, store, **given)
        assert result.equal, str(result)
        assert list(found(whole, optimizer))[:-1] == before


def test_an_optimizer_that_the_step_makes_beside_a_frozen_heap():
    model, head, x = nn.Linear(4, 4), nn.Linear(4, 1), torch.randn(3, 4)
    gc.freeze()

    def step():
        loss = head(model(x)).square().mean()
        loss.backward()
        torch.optim.SGD(head.parameters(), lr=0.0).step()
        head.zero_grad()
        return loss.detach()

    assert check_gradients(step, ActivationStore(model, "raw", min_bytes=0)).equal


def test_optimizers_that_do_not_step_are_left_alone():
    """Another thread may train with them."""
    model, other, x = nn.Linear(4, 4), nn.Linear(4, 1), torch.randn(3, 4)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(x).sum().backward()

    def step():
        other.weight.grad.add_(1)
        return model(x).sum()

    grad, before = other.weight.grad, other.weight.grad.clone()
    assert check_gradients(step, ActivationStore(model, "raw", min_bytes=0)).equal
    assert other.weight.grad is grad
    assert torch.equal(grad, before + 5)  # each run was one
    assert optimizer.param_groups[0]["params"][0] is other.weight


class Keeper(nn.Module):
    """A module whose state is in containers of containers, and in tensors there."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.recent = deque([1.0], maxlen=2)
        self.table = {"rows": [[1], {2}], "pair": ([3], torch.zeros(2)), "recent": deque([self.recent])}
        self.table["itself"] = self.table
        self.counts = torch.zeros(3)

    def forward(self, x):
        scale = 1 + sum(self.recent) + len(self.table["rows"][0]) + len(self.table["rows"][1])
        scale = scale + self.counts.sum() + self.table["pair"][1].sum() + self.table["pair"][0][0]
        self.recent.append(2.0)
        self.table["rows"][0].append(5)
        self.table["rows"][1].add(6)
        self.table["rows"].append(None)
        self.table["pair"][0][0] = 7
        self.table["pair"][1].add_(1)
        self.table["recent"].clear()
        self.counts += 1
        return self.linear(x) * scale


def test_containers_in_containers_are_put_back():
    model, x = Keeper(), torch.randn(3, 4)
    held = model.recent, model.counts, model.table["pair"][1]
    versions = [tensor._version for tensor in held[1:]]
    before = str(vars(model))
    result = check_gradients(lambda: model(x).sum(), ActivationStore(model, "raw", min_bytes=0))
    assert result.equal, str(result)
    assert str(vars(model)) == before
    assert model.recent is held[0] is model.table["recent"][0]
    assert (model.recent.maxlen, model.counts is held[1], model.table["pair"][1] is held[2]) == (2, True, True)
    assert [tensor._version for tensor in held[1:]] == versions
    model(x)
    assert str(vars(model)) != before


class Stuck:
    """It cannot be put back more than a few times."""

    def __init__(self, times):
        self.times = times

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.times -= 1
        if self.times < 0:
            raise ValueError("stuck")


@pytest.mark.parametrize(
    ("raises", "times", "error", "notes"),
    [("plain", 1, KeyError, 1), (None, 5, ValueError, 0), (None, 1, ValueError, 1)],
    ids=["step", "at the end", "in between"],
)
def test_what_cannot_be_put_back_leaves_nothing_else_behind(raises, times, error, notes):
    training = Training(raises)
    before = training.found()
    store, stateful = ActivationStore(training.model, "raw", min_bytes=0), [Stuck(times), training.schedule]
    with pytest.raises(error) as info:
        check_gradients(training, store, stateful=stateful)
    assert training.found() == before
    note = "Afterwards not all could be put back as it was: ValueError: stuck"
    assert getattr(info.value, "__notes__", []) == [note] * notes


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_are_put_back(layout):
    blocks = {"blocksize": (2, 2)} if layout == torch.sparse_bsr else {}
    model = nn.Module()
    model.parameter = nn.Parameter(torch.eye(4).to_sparse(layout=layout, **blocks))
    model.register_buffer("buffer", torch.eye(4).to_sparse(layout=layout, **blocks))
    kept = model.buffer.values()
    with ModelState(model, (), ()), torch.no_grad():
        model.parameter.mul_(2)
        kept.mul_(3)
        if layout == torch.sparse_coo:
            model.parameter.add_(torch.ones(4, 4).to_sparse())  # other indices
        assert not torch.equal(model.parameter.to_dense(), torch.eye(4))
        assert not torch.equal(model.buffer.to_dense(), torch.eye(4))
    assert torch.equal(model.parameter.to_dense(), torch.eye(4))
    assert torch.equal(model.buffer.to_dense(), torch.eye(4))
    assert model.buffer.values().data_ptr() == kept.data_ptr()
    assert model.parameter.layout == layout
