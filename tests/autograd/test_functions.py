"""Users' own functions, and hooks on tensors, nodes and modules, around what a store brings back."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, save_on_cpu

from actstore import ActivationStore
from actstore.errors import MutationError
from tests.autograd.checks import check_drained, check_same, gc_off

POLICIES = ["keep", "raw", "raw @ disk"]


class Everything(torch.autograd.Function):
    """Saves an input, an output, an intermediate, None, and what is no tensor."""

    @staticmethod
    def forward(ctx, x, scale):
        middle = x.sin()
        out = middle.exp()
        ctx.save_for_backward(x, out, middle, None)
        ctx.scale, ctx.shape = scale, x.shape
        return out * scale, out

    @staticmethod
    def backward(ctx, first, second):
        x, out, middle, nothing = ctx.saved_tensors
        again = ctx.saved_tensors
        assert nothing is None
        assert x.shape == ctx.shape
        check_same(list(again[:3]), [x, out, middle])
        return (first * ctx.scale + second) * out * x.cos() + 0 * middle, None


def make(policy):
    return ActivationStore(policy=policy, min_bytes=0)


def compare(run, policy):
    """The results of `run` with a store around its forward and without; its second part runs after the context."""
    store = make(policy)
    with gc_off():
        with store:
            after = run()
        check_same(after(), run()())
        del after
        check_drained(store)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_function_of_the_users_own(policy):
    def run():
        torch.manual_seed(0)
        x = torch.randn(4, 8, requires_grad=True)
        first, second = Everything.apply(x * 1, 3)
        return lambda: torch.autograd.grad((first + second.tanh()).sum(), x)

    compare(run, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_hooks_on_tensors_nodes_and_modules(policy):
    def run():
        torch.manual_seed(0)
        model, seen = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), []
        model[1].register_full_backward_hook(lambda _, grads, __: seen.append(grads[0]))
        model[0].register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,))
        x = torch.randn(3, 8, requires_grad=True)
        h = model[1](model[0](x))
        h.register_hook(lambda grad: grad.clamp(max=0.1))
        y = model[2](h)
        y.grad_fn.register_hook(lambda inputs, _: seen.extend(inputs[1:2]))
        register_multi_grad_hook((h, y), seen.extend)

        def after():
            grads = torch.autograd.grad(y.exp().sum(), [x, *model.parameters()])
            return [*grads, *seen]

        return after

    compare(run, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_at_edges_of_the_graph(policy):
    def run():
        torch.manual_seed(0)
        x = torch.randn(8, requires_grad=True)
        h = x.exp()
        y = h.sin()
        edges = get_gradient_edge(y), get_gradient_edge(h)
        del h, y
        return lambda: torch.autograd.grad(edges[0], [x, edges[1]], grad_outputs=torch.ones(8))

    compare(run, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_save_on_cpu_inside(policy):
    def run():
        torch.manual_seed(0)
        x = torch.randn(8, requires_grad=True)
        h = x.exp()
        with save_on_cpu():
            h = h.sin()
        y = h.exp()
        return lambda: torch.autograd.grad(y.sum(), x)

    compare(run, policy)


class AddsToMainGrad(torch.autograd.Function):
    """Adds the gradient of a weight to one of its attributes, as Megatron-LM does."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.save_for_backward(x, None, weight)
        ctx.scale = scale
        return scale * x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, nothing, weight = ctx.saved_tensors
        assert nothing is None
        assert ctx.saved_tensors[2] is weight
        weight.main_grad += ctx.scale * grad.t() @ x
        return ctx.scale * grad @ weight, None, None


@pytest.mark.parametrize("policy", [*POLICIES, "int8"])
def test_a_weight_comes_back_with_its_attributes(policy):
    def run():
        torch.manual_seed(0)
        x, weight = torch.randn(3, 8, requires_grad=True), nn.Parameter(torch.randn(4, 8))
        weight.main_grad, weight.label = torch.zeros(4, 8), "w"
        y = AddsToMainGrad.apply(x * 1, weight, 2.0)
        z = Everything.apply(x * 1, 3)[0]

        def after():
            return [*torch.autograd.grad(y.sum() + z.sum(), x), weight.main_grad]

        return after

    if policy == "int8":
        with make(policy):
            after = run()
        (_, found), (_, wanted) = after(), run()()
        assert (found - wanted).norm() < 0.02 * wanted.norm()
    else:
        compare(run, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_weight_with_attributes_that_has_changed_is_refused(policy):
    weight = nn.Parameter(torch.randn(4, 8))
    weight.main_grad = torch.zeros(4, 8)
    with make(policy):
        y = AddsToMainGrad.apply(torch.randn(3, 8, requires_grad=True), weight, 1.0)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(MutationError):
        y.sum().backward()
