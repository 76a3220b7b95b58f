"""Operators whose kernels call others: below a region's mode they see autocast and conjugated views as without it."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo  # the first region with a mode would import it, and frames of the import hold tensors
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore
from tests.autograd.checks import check_drained, check_same, gc_off

WIDTH = 8
EXACT = ["layers.*/@matmul : keep; layers.* : recompute", "layers.*/@aten._trilinear : raw; layers.* : recompute"]
LOSSY = ["layers.*/@matmul : int8; layers.* : recompute", "layers : recompute(int8)"]


@torch.library.custom_op("actstore_tests::product", mutates_args=())
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A user's operator, for which autocast has no kernel: its product is one of autocast."""
    return (x @ y).float()


product.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("actstore_tests::cast_product", mutates_args=())
def cast_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One that autocast casts for, and runs without autocast."""
    return (x @ y).clone()


cast_product.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
cast_product.register_autocast("cpu", torch.float32)


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x.float(), x.float().cos())


class Nested(Bilinear):
    """Autocast is off for a part of the region, and on inside of that."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = super().forward(x)
            with torch.autocast("cpu", torch.float16):
                z = super().forward(y)
        return super().forward(y + z)


class Product(nn.Module):
    operator = product

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return type(self).operator(x.float(), self.weight)


class CastProduct(Product):
    operator = cast_product


class Inverse(nn.Module):
    """Of complex numbers, with autocast off, as plain PyTorch has it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x):
        x = x.to(torch.complex64)
        return torch.linalg.pinv(x.mH @ x + self.weight).abs()


class Slope(nn.Module):
    """The slope of SiLU: its kernel has other bits than the composition that some devices have in its place."""

    def forward(self, x):
        with torch.no_grad():
            slope = torch.ops.aten.silu_backward(x.cos(), x)
        return x * slope


class Twice(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), make())

    def forward(self, x):
        return self.layers(x)


MODULES = {"bilinear": Bilinear, "nested": Nested, "product": Product, "cast_product": CastProduct}
AUTOCAST = {
    "on": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "no cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "off": nullcontext,
    "disabled": lambda: torch.autocast("cpu", torch.bfloat16, enabled=False),
}


def step(model, context, store=None, *, inside=False):
    """Output and gradients; the backward `inside` of autocast and of the store, or after both."""
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()
    with store or nullcontext(), context():
        output = model(x)
        if inside:
            output.float().square().sum().backward()
    if not inside:
        output.float().square().sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in model.parameters())]


def compare(model, policy, context, *, exact=True, **options):
    wanted = step(copy.deepcopy(model), context, **options)
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        found = step(model, context, store, **options)
        check_same(found if exact else found[0], wanted if exact else wanted[0])
        del found
        check_drained(store)
    return wanted[0]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("context", AUTOCAST)
@pytest.mark.parametrize("policy", EXACT)
@pytest.mark.parametrize("name", MODULES)
def test_autocast_is_as_in_plain_training(name, policy, context, inside):
    torch.manual_seed(0)
    compare(Twice(MODULES[name]), policy, AUTOCAST[context], inside=inside)


@pytest.mark.parametrize("context", AUTOCAST)
@pytest.mark.parametrize("policy", LOSSY)
@pytest.mark.parametrize("name", MODULES)
def test_forwards_of_lossy_regions_have_the_bits_of_plain_training(name, policy, context):
    torch.manual_seed(0)
    compare(Twice(MODULES[name]), policy, AUTOCAST[context], exact=False)


@pytest.mark.parametrize("policy", [*EXACT, *LOSSY])
def test_conjugated_views_in_a_kernel(policy):
    torch.manual_seed(0)
    compare(Twice(Inverse), policy, nullcontext, exact=policy in EXACT)


@pytest.mark.parametrize("policy", [*EXACT, *LOSSY])
def test_kernels_are_those_of_the_device(policy):
    torch.manual_seed(0)
    compare(Twice(Slope), policy, nullcontext, exact=policy in EXACT)


class Attends(nn.Module):
    """Attention in inference mode, which writes in place to weights that it drops."""

    def forward(self, x):
        with torch.inference_mode():
            seen = F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        return x * seen.clone().sum()


@pytest.mark.parametrize("policy", EXACT)
def test_the_mode_of_changed_tensors_sees_whole_compositions(policy):
    """Parts of one, in inference mode, ended with an error of that mode."""
    model, x = nn.ModuleDict({"layers": nn.Sequential(Attends())}), torch.randn(2, 4, WIDTH, dtype=torch.float64)
    found = []
    for context in (nullcontext(), ActivationStore(model, policy, min_bytes=0)):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(0)
        with context, torch.autograd.graph.allow_mutation_on_saved_tensors():
            model["layers"](leaf).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)
