"""Calls of a region share their snapshots while nothing changes: each change after such calls counts as ever."""

from contextlib import nullcontext
from contextvars import Context, ContextVar, copy_context
from weakref import ref

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from actstore.errors import MutationError
from actstore.recompute import region_state
from tests.autograd.checks import check_drained, gc_off, same_bits
from tests.autograd.models import WIDTH

STEPS, CHANGED = 5, 2  # all steps, and the one with the change
OPTIONS = ContextVar("options")  # a container, as that of PyTorch's compiler once it is imported
INSIDE = []  # names of methods that forwards call: the module itself tells nothing of them


class Plain(nn.Module):
    """Has nothing but parameters, modules and plain attributes, so that calls share what is the same."""

    gain = 1.0

    def __init__(self):
        super().__init__()
        self.inner, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.guard = 1.0, False

    def forward(self, x):
        y = torch.tanh(self.inner(x) * self.scale * self.gain)
        for name in INSIDE:
            getattr(self, name)()
        self.guard = True
        y = torch.sin(self.other(y) * self.scale * getattr(self, "late", 1.0))
        self.guard = False
        return y

    def rescales(self):
        self.scale *= 1.5

    def adds_an_attribute(self):
        self.late = 0.5

    def adds_a_parameter(self):
        self.register_parameter("more", nn.Parameter(torch.ones(1)))

    def writes_the_same(self):
        with torch.no_grad():
            self.inner.bias.copy_(self.inner.bias.clone())


def halves(module, _args, output):
    return output * 0.5


CHANGES = {  # between forward and backward, or between steps
    "attribute": lambda part: setattr(part, "scale", 0.25),
    "new attribute": lambda part: setattr(part, "late", 0.25),
    "attribute of the class": lambda part: setattr(type(part), "gain", 0.25),
    "parameter": lambda part: setattr(part.inner, "weight", nn.Parameter(part.inner.weight.detach() * 0.5)),
    "frozen": lambda part: part.inner.weight.requires_grad_(False),
    "mode": lambda part: part.eval(),
    "hook": lambda part: part.other.register_forward_hook(halves),
    "forward": lambda part: setattr(part.other, "forward", lambda x: nn.Linear.forward(part.other, x) * 0.5),
}


def trained(stored, at_step, between):
    """Gradients of all steps, and what attributes are then. `at_step` and `between` change the part in step CHANGED."""
    Plain.gain = 1.0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), part := Plain())
    store = ActivationStore(model, "1 : recompute", min_bytes=0) if stored else nullcontext()
    found = []
    for step in range(STEPS):
        x = torch.randn(3, WIDTH)
        if step == CHANGED:
            at_step(part)
        with store:
            y = model(x)
        if step == CHANGED:
            between(part)
        y.sum().backward()
        INSIDE.clear()
        found += [y.detach(), *(each.grad for each in model.parameters())]
        model.zero_grad()
        found.append(
            torch.tensor([part.scale, part.gain, getattr(part, "late", 1.0), part.guard, len(part._parameters)])
        )
    if stored:
        check_drained(store)
    return found


def check(at_step=lambda _: None, between=lambda _: None):
    found, wanted = (trained(stored, at_step, between) for stored in (True, False))
    assert len(found) == len(wanted)
    assert all(map(same_bits, found, wanted))


def test_nothing_changes():
    check()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps(change):
    check(at_step=CHANGES[change])


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_forward_and_backward(change):
    check(between=CHANGES[change])


@pytest.mark.parametrize("inside", ["rescales", "adds_an_attribute", "adds_a_parameter", "writes_the_same"])
def test_a_forward_changes_its_module(inside):
    check(at_step=lambda _: INSIDE.append(inside))


def test_a_write_to_a_parameter_between_forward_and_backward_is_refused():
    def written(part):
        with torch.no_grad():
            part.inner.weight.mul_(0.5)

    with pytest.raises(MutationError, match="parameter inner"):
        trained(True, lambda _: None, written)


@pytest.mark.parametrize("options", [{}, {"rates": [0.5, {"deep": 2.0}]}, [1, "a"], object()])
def test_calls_share_snapshots_beside_a_container_in_a_context_variable(options, monkeypatch):
    made, weights = [], region_state.Weights
    monkeypatch.setattr(region_state, "Weights", lambda *args: made.append(1) or weights(*args))

    def counted():
        OPTIONS.set(options)
        found = trained(True, lambda _: made.clear(), lambda _: None)  # the steps before have found the state
        assert all(map(same_bits, found, trained(False, lambda _: None, lambda _: None)))
        assert made == []

    Context().run(counted)  # earlier tests have set what is not shared


def nested(options):
    options["rates"][1]["deep"] = 0.25


OPTION_CHANGES = {
    "set": lambda _: OPTIONS.set({"rates": [0.5, {"deep": 0.25}]}),
    "content": lambda options: options.update(rates=[0.5, {"deep": 0.25}]),
    "nested content": nested,
}


@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "before backward"])
@pytest.mark.parametrize("change", OPTION_CHANGES)
def test_a_change_of_a_container_in_a_context_variable(change, inside, monkeypatch):
    def scaled(self, x):
        return torch.sin(self.inner(x)) * OPTIONS.get()["rates"][1]["deep"]

    monkeypatch.setattr(Plain, "forward", scaled)

    def changed(_part):
        OPTION_CHANGES[change](OPTIONS.get())

    def run(stored):
        OPTIONS.set({"rates": [0.5, {"deep": 2.0}]})
        at_step, between = (lambda _: None, changed) if inside else (changed, lambda _: None)
        return trained(stored, at_step, between)

    found, wanted = (copy_context().run(run, stored) for stored in (True, False))
    assert all(map(same_bits, found, wanted))


def test_a_container_in_a_context_variable_is_not_kept():
    """It may get a tensor with a graph later, which holds what the calls of a region hold."""

    def run():
        OPTIONS.set({})
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Plain())
        store = ActivationStore(model, "1 : recompute", min_bytes=0)
        with gc_off():
            for _ in range(STEPS):
                with store:
                    loss = model(torch.randn(3, WIDTH)).sum()
                loss.backward(retain_graph=True)
            OPTIONS.get()["loss"], weak = loss, ref(loss)
            OPTIONS.set({})
            del loss
            assert weak() is None

    copy_context().run(run)


def test_calls_share_snapshots_after_torch_compile(monkeypatch):
    """The compiler leaves its settings in context variables, and caches of them in containers that it fills later."""
    made, weights = [], region_state.Weights

    def run():
        torch._dynamo.reset()  # it would find the code that an earlier test has compiled, and set nothing
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(2, requires_grad=True)).sum().backward()
        if not any(variable.name.startswith("torch.") for variable in copy_context()):
            pytest.skip("this compiler leaves nothing in context variables, such as that of PyTorch 2.11")
        monkeypatch.setattr(region_state, "Weights", lambda *args: made.append(1) or weights(*args))
        trained(True, lambda _: made.clear(), lambda _: None)
        assert made == []

    Context().run(run)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_second_run_has_the_settings_of_the_compiler_from_the_first_run(compiled, monkeypatch):
    from torch._functorch import config

    def scaled(self, x):
        return torch.sin(self.inner(x)) * (0.5 if config.donated_buffer else 2.0)

    def run(stored):
        if compiled:
            torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))
        found = []
        for step in range(STEPS):
            patch = config.patch(donated_buffer=step % 2 == 0)
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Plain())
            store = ActivationStore(model, "1 : recompute", min_bytes=0) if stored else nullcontext()
            with patch, store:
                y = model(torch.randn(3, WIDTH))
            with config.patch(donated_buffer=step % 2 == 1):
                y.sum().backward()
            found += [each.grad for each in model.parameters() if each.grad is not None]
        return found

    monkeypatch.setattr(Plain, "forward", scaled)
    found, wanted = (copy_context().run(run, stored) for stored in (True, False))
    assert len(found) == len(wanted) > 0
    assert all(map(same_bits, found, wanted))
