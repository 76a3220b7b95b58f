"""Parameters, modules and buffers that a recomputed module registers in its forward."""

import copy

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from actstore.errors import StateError
from tests.autograd.checks import check_drained, check_same, gc_off
from tests.autograd.models import WIDTH

RECOMPUTE = ["recompute", "recompute(raw @ disk)", "recompute(segment=2)", "recompute(schedule=revolve, slots=1)"]


class Making(nn.Module):
    """Multiplies by what `make` has registered."""

    def __init__(self, make):
        super().__init__()
        self.inner, self.make, self.late = nn.Linear(WIDTH, WIDTH), make, None
        self.parts, self.weights = nn.ModuleList(), nn.ParameterList()
        self.register_parameter("none", None)
        self.register_buffer("old", torch.ones(WIDTH))

    def forward(self, x):
        return torch.tanh(self.inner(x) * self.make(self, x))


def parameter(module, x):
    if module.late is None:
        module.late = nn.Parameter(torch.rand(WIDTH))
    return module.late


def registered_as_none(module, x):
    if module.none is None:
        module.none = nn.Parameter(torch.rand(WIDTH))
    return module.none


def part(module, x):
    if module.late is None:
        module.late = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
    return module.late(x)


def parts_in_lists(module, x):
    if len(module.parts) < 2:
        module.parts.append(nn.Linear(WIDTH, WIDTH))
        module.weights.append(nn.Parameter(torch.rand(WIDTH)))
    for layer, weight in zip(module.parts, module.weights, strict=True):
        x = layer(x) * weight
    return x


def buffer(module, x):
    if not hasattr(module, "count"):
        module.register_buffer("count", torch.zeros(()))
    module.count.add_(1.0)
    return module.count.clone()


def buffers_of_each_call(module, x):
    number = len(list(module.buffers()))
    module.register_buffer(f"of{number}", x.detach().mean(0))
    return sum(module.buffers())


def removed(module, x):
    if hasattr(module, "old"):
        scale = module.old * 2
        del module.old
        return scale
    return 1.0


def replaced(module, x):
    """A layer of forward's own in each call."""
    module.inner2 = nn.Linear(WIDTH, WIDTH)
    return module.inner2(x)


MAKERS = [
    parameter, registered_as_none, part, parts_in_lists, buffer, buffers_of_each_call, removed,
]  # fmt: skip


def model_of(make, count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Making(make) for _ in range(count)))


def trained(model, store, calls):
    """All that three steps leave, where the optimizer is made after the first forward."""
    optimizer, left = None, []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(6, WIDTH)
        if store is None:
            loss = sum(model(x * k).square().mean() for k in range(1, 1 + calls))
        else:
            with store:
                loss = sum(model(x * k).square().mean() for k in range(1, 1 + calls))
        if optimizer is None:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        left += [
            loss.detach(),
            *(p.detach().clone() for p in model.parameters()),
            *(p.grad for p in model.parameters()),
        ]
        left += [torch.tensor([*map(ord, name)]) for name in model.state_dict()]
    return left + [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("decision", RECOMPUTE)
def test_what_forward_registers_is_trained(decision, make, calls):
    model = model_of(make)
    plain = copy.deepcopy(model)
    store = ActivationStore(model, f"[0-9] : {decision}", min_bytes=0)
    with gc_off():
        check_same(trained(model, store, calls), trained(plain, None, calls))
        check_drained(store)


def test_a_module_that_forward_replaces_in_each_call_is_that_of_the_first_run():
    model = model_of(replaced, 1)
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        loss = model(torch.randn(6, WIDTH)).sum()
    layer = model[0].inner2
    loss.backward()
    assert model[0].inner2 is layer
    assert layer.weight.grad is not None


def test_it_is_registered_in_its_order_again():
    """Two calls register one each; backward runs the second one again first."""
    model = model_of(lambda module, x: buffers_of_each_call(module, x) * parts_in_lists(module, x), 1)
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        loss = model(torch.randn(6, WIDTH)).sum() + model(torch.randn(6, WIDTH)).sum()
    names = [*model.state_dict()]
    loss.backward()
    assert [*model.state_dict()] == names


def test_what_other_code_registers_since_is_absent_in_the_second_run():
    def optional(module, x):
        return module.extra if hasattr(module, "extra") else 1.0

    model = model_of(optional, 1)
    plain, x = copy.deepcopy(model), torch.randn(6, WIDTH)
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        loss = model(x).square().sum()
    extra = nn.Parameter(torch.zeros(WIDTH))
    model[0].register_parameter("extra", extra)
    loss.backward()
    assert model[0].extra is extra
    plain(x).square().sum().backward()
    check_same(model[0].inner.weight.grad, plain[0].inner.weight.grad)


def test_a_tensor_that_is_read_before_forward_ends():
    def early(module, x):
        y = parameter(module, x) * buffer(module, x)
        z = (module.inner(x) * y).exp()
        assert z.grad_fn._saved_result.shape == z.shape  # it runs again here
        assert module.late is y.grad_fn.next_functions[0][0].variable
        return z

    model = model_of(early, 1)
    plain = copy.deepcopy(model)
    store = ActivationStore(model, "0 : recompute", min_bytes=0)
    check_same(trained(model, store, 1), trained(plain, None, 1))


def test_what_an_excepted_part_registers_stays():
    model = model_of(part, 1)
    model.append(nn.Linear(WIDTH, WIDTH))
    outer = nn.Sequential(model)
    plain = copy.deepcopy(outer)
    store = ActivationStore(outer, "0.0 : keep; 0 : recompute", min_bytes=0)
    check_same(trained(outer, store, 2), trained(plain, None, 2))


def test_a_module_that_other_code_replaces_since_is_refused():
    model = model_of(part, 1)
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        loss = model(torch.randn(6, WIDTH)).sum()
    model[0].late = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(StateError, match=r"module=Making\.late: it was replaced"):
        loss.backward()
