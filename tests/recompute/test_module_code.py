"""Hooks, forwards and classes of modules that other code changes between forward and backward."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from actstore import ActivationStore
from actstore.errors import StateError
from tests.autograd.checks import check_drained, gc_off, same_bits
from tests.autograd.models import WIDTH


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Louder(Mlp):
    def forward(self, x):
        return super().forward(x) * 3.0


class Block(nn.Module):
    """Its calls share what they keep, as they change nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x):
        return x + self.mlp(torch.tanh(self.a(x)))


class Counting(Block):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def halves(_module, _args, output):
    return output * 0.5


def adds(_module, _args, output):
    return output + 1.0


def writes(_module, _args, output):
    output.mul_(0.5)


def halves_input(_module, args):
    return (args[0] * 0.5,)


def halves_with_words(_module, _args, _kwargs, output):
    return output * 0.5


def scaled(module, x):
    return nn.Linear.forward(module, x) * 0.5


class Coded(Block):
    """Has hooks, and parts with forwards of their own."""

    def __init__(self):
        super().__init__()
        self.mlp.up.register_forward_hook(halves)
        self.mlp.up.register_forward_hook(adds)
        self.mlp.act.register_forward_hook(halves_with_words, with_kwargs=True)
        self.a.register_forward_pre_hook(halves_input)
        self.mlp.down.forward = tanh_of


def tanh_of(x):
    return torch.tanh(x)


def turned_around(block):
    hooks = block.mlp.up._forward_hooks
    hooks.move_to_end(next(iter(hooks)))


def another_hook(block):
    hooks = block.mlp.up._forward_hooks
    hooks[next(iter(hooks))] = adds


NEW = {  # code that a module has from then on
    "hook": lambda block: block.mlp.register_forward_hook(halves),
    "hook deep inside": lambda block: block.mlp.up.register_forward_hook(halves),
    "hook before": lambda block: block.mlp.up.register_forward_pre_hook(halves_input),
    "hook with words": lambda block: block.mlp.register_forward_hook(halves_with_words, with_kwargs=True),
    "hook that writes": lambda block: block.mlp.register_forward_hook(writes),
    "forward": lambda block: setattr(block.mlp.up, "forward", partial(scaled, block.mlp.up)),
    "class": lambda block: setattr(block.mlp, "__class__", Louder),
    "weight norm": lambda block: weight_norm(block.a),
    "prune": lambda block: torch.nn.utils.prune.l1_unstructured(block.a, "weight", 0.5),
    "weight": lambda block: delattr(block.a, "weight"),
}
GONE = {  # code that a module had in forward
    "hook": lambda block: block.mlp.up._forward_hooks.popitem(),
    "hooks": lambda block: block.mlp.up._forward_hooks.clear(),
    "hook before": lambda block: block.a._forward_pre_hooks.clear(),
    "hook with words": lambda block: (
        block.mlp.act._forward_hooks.clear(),
        block.mlp.act._forward_hooks_with_kwargs.clear(),
    ),
    "another hook": another_hook,
    "order": turned_around,
    "forward": lambda block: delattr(block.mlp.down, "forward"),
    "another forward": lambda block: setattr(block.mlp.down, "forward", partial(scaled, block.mlp.up)),
}


def trained(kind, change, policy=None, steps=3):
    """Train steps, the last one with a change between forward and backward. Return gradients, and the code then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block := kind())
    weights = [*model.parameters()]
    store = nullcontext() if policy is None else ActivationStore(model, policy, min_bytes=0)
    for step in range(steps):
        with store:
            y = model(torch.randn(3, WIDTH))
        if step == steps - 1:
            change(block)
        for each in weights:
            each.grad = None
        y.square().sum().backward()
    if policy is not None:
        check_drained(store)
    hooks = [{**each._forward_hooks, **each._forward_pre_hooks}.values() for each in model.modules()]
    code = [[*map(id, each)] for each in hooks if change is not NEW["prune"]]
    return [each.grad for each in weights], (code, type(block.mlp), "forward" in vars(block.mlp.down))


def check(kind, change, policy="1 : recompute"):
    wanted, code = trained(kind, change)
    found, left = trained(kind, change, policy)
    assert left == code
    assert all(map(same_bits, found, wanted))


@pytest.mark.parametrize("policy", ["1 : recompute", "1.a : keep; 1 : recompute", "1 : recompute(schedule=sqrt)"])
@pytest.mark.parametrize("kind", [Block, Counting])
@pytest.mark.parametrize("change", NEW)
def test_new_code_is_not_run(change, kind, policy):
    check(kind, NEW[change], policy)


@pytest.mark.parametrize("change", GONE)
def test_code_that_is_gone_runs_again(change):
    check(Coded, GONE[change])


def forward_and_backward(hooks):
    """Remove the hook in a list between forward and backward. Frames of callers do not hold it."""
    hook = hooks.pop()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block())
    handle = model[1].mlp.up.register_forward_hook(hook)
    del hook
    with ActivationStore(model, "1 : recompute", min_bytes=0):
        y = model(torch.randn(3, WIDTH))
    handle.remove()
    y.sum().backward()


def test_a_hook_that_only_observes_is_not_called_after_its_removal():
    calls = []
    forward_and_backward([lambda *_: calls.append(1)])
    assert calls == [1]


class Hook:
    """A hook that may hold a graph, for all that anyone can tell."""

    def __init__(self, effect):
        self.effect = effect

    def __call__(self, *given):
        return self.effect(*given)


@pytest.mark.parametrize(
    "effect", [halves, writes, lambda module, *_: vars(module).update(seen=True)], ids=["returns", "writes", "sets"]
)
def test_the_removal_of_a_hook_that_changes_something_is_refused(effect):
    with pytest.raises(StateError, match=r"attribute=_forward_hooks\[\d+\]: other code changed it between"):
        forward_and_backward([Hook(effect)])


def test_the_removal_of_a_forward_that_may_hold_a_graph_is_refused():
    model, seen = nn.Sequential(nn.Linear(WIDTH, WIDTH), block := Block()), []
    block.mlp.forward = lambda x: seen.append(x) or torch.tanh(x)
    with ActivationStore(model, "1 : recompute", min_bytes=0):
        y = model(torch.randn(3, WIDTH))
    del block.mlp.forward
    with pytest.raises(StateError, match=r"attribute=Mlp\.forward: other code changed it between"):
        y.sum().backward()


def test_hooks_that_hold_outputs_keep_no_graph():
    model, seen = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block()), []
    model[1].mlp.register_forward_hook(lambda _module, _args, output: seen.append(output))
    with gc_off():
        store = ActivationStore(model, "1 : recompute", min_bytes=0)
        with store:
            model(torch.randn(3, WIDTH))
        seen.clear()
        check_drained(store)


def test_a_hook_that_forward_registers_is_called_once_a_run():
    class Registers(Block):
        handle = None

        def forward(self, x):
            if self.handle is None:
                self.handle = self.mlp.register_forward_hook(halves)
            return super().forward(x)

    check(Registers, lambda _: None)
