"""Whatever the step does, everything is as it was found."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from actstore import ActivationStore, check_gradients
from actstore.session import is_active
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
    training = Training(raises="plain")
    with pytest.raises(KeyError):
        check_gradients(training, ActivationStore(training.model))
    assert [len(table) for table in tables] == [0, 0, 0]
    assert not any(p._post_accumulate_grad_hooks for p in training.model.parameters())
