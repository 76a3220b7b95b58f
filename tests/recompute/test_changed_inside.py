"""A recomputed module that writes to a tensor which autograd has saved inside of it."""

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from actstore.errors import MutationError
from tests.autograd.checks import check_same

DECISIONS = ["recompute", "recompute(raw)", "recompute(raw @ disk)", "recompute(int8)", "recompute(schedule=sqrt)"]


class Changes(nn.Module):
    """Multiplies what exp has saved; `after` says whether more is saved later."""

    def __init__(self, *, after):
        super().__init__()
        self.linear, self.after = nn.Linear(8, 8), after

    def forward(self, x):
        h = self.linear(x).exp()
        y = h * 1
        with torch.no_grad():
            h.mul_(3)
        return y.sin() if self.after else y


def step(model, x, store=None):
    if store is None:
        return torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    with store:
        loss = model(x).sum()
    return torch.autograd.grad(loss, [x, *model.parameters()])


@pytest.mark.parametrize("decision", DECISIONS)
def test_it_is_refused_as_without_a_store(decision):
    torch.manual_seed(0)
    model, x = nn.Sequential(Changes(after=True)), torch.randn(3, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, x)
    store = ActivationStore(model, f"0 : {decision}", min_bytes=0)
    with pytest.raises(MutationError, match="modified by an inplace operation") as info:
        step(model, x, store)
    assert (info.value.expected, info.value.found) == (0, 1)
    assert f"saved inside 0 ({decision})" in str(info.value)
    del info


def test_a_second_run_that_ends_before_the_write_has_the_value_that_was_saved():
    torch.manual_seed(0)
    model, x = nn.Sequential(Changes(after=False)), torch.randn(3, 8, requires_grad=True)
    found = step(model, x, ActivationStore(model, "0 : recompute", min_bytes=0))
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        check_same(found, step(model, x))


@pytest.mark.parametrize("decision", DECISIONS)
def test_what_is_changed_before_it_is_saved_is_used(decision):
    class Before(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            h = self.linear(x)
            h += 1
            return h.relu_().sin().mul_(2).exp()

    torch.manual_seed(0)
    model, x = nn.Sequential(Before()), torch.randn(3, 8, requires_grad=True)
    found = step(model, x, ActivationStore(model, f"0 : {decision}", min_bytes=0))
    if "int8" not in decision:
        check_same(found, step(model, x))
