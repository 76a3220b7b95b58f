"""Decisions of backward are those of exact values, however they reach them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actstore import ActivationStore
from tests.autograd.checks import check_same

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself


class Deciding(nn.Module):
    """Its gradient is what `decide` lets through, and nothing else: the smooth part only saves `h` for backward.

    Autocast has `h` in bfloat16 where it is a `product`.
    """

    def __init__(self, decide: Callable[[Tensor], Tensor], *, product: bool = False) -> None:
        super().__init__()
        self.scale, self.decide = nn.Parameter(torch.eye(256) if product else torch.ones(256)), decide
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.scale if self.product else x * self.scale
        return self.decide(h) + 0.0 * (h * h * h)


def input_gradient(model: nn.Module, x: Tensor, store: ActivationStore | None) -> Tensor:
    x = x.clone().requires_grad_()
    if store is None:
        model(x).sum().backward()
    else:
        with store:
            loss = model(x).sum()
        loss.backward()
    assert x.grad is not None
    return x.grad


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky_relu": lambda h: F.leaky_relu(h, 0.1),
    "abs": torch.abs,
    "clamp": lambda h: h.clamp(-0.5, 0.25),
    "clamp of a sum": lambda h: (2.0 * h + 0.25).clamp(min=0),
    "maximum": lambda h: torch.maximum(h, h.detach().flip(0)),
    "where": lambda h: torch.where(h > 0.125, h, -h),
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "max": lambda h: h.amax(1, keepdim=True),
    "hardswish's kinks": lambda h: F.hardtanh(h, -3.0, 3.0),
    "relu of a norm": lambda h: F.relu(h - h.detach().mean(0)),
    "max pooling": lambda h: F.max_pool2d(h.view(4, 16, 16, 16), 2).reshape(-1, 256).repeat(4, 1),
    "routing": lambda h: h * torch.zeros_like(h).scatter(1, h.topk(4, 1).indices, 1.0),
    "routing to one": lambda h: h * F.one_hot(h.argmax(1), 256),
    "sort": lambda h: h.sort(1).values * torch.arange(256.0),
    "median": lambda h: h.median(1, keepdim=True).values.expand(-1, 256),
}

POLES: dict[str, Callable[[Tensor], Tensor]] = {  # no payload of these has a loss
    "logit": lambda h: torch.logit(0.1 * h + 0.5),
    "lgamma": lambda h: torch.lgamma(0.1 * h + 1.0),
}


@pytest.mark.parametrize("name", CASES | POLES)
@pytest.mark.parametrize(("policy", "autocast"), [("int8", False), ("int4", False), ("int4", True)])
def test_what_passes_is_what_passes_without_a_loss(name: str, policy: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model, x = Deciding((CASES | POLES)[name], product=autocast), torch.randn(64, 256)
    x[:, ::4] *= 1e-4  # far below a step
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        wanted = input_gradient(model, x, None)
        store = ActivationStore(model, policy, min_bytes=0)
        store.compile(backend="aot_eager")
        check_same(input_gradient(model, x, store), wanted)
    assert store.report().saved_bytes > 0


@pytest.mark.parametrize(("name", "least"), [("relu", 3.5), ("clamp", 2.5), ("where", 2.5), ("clamp of a sum", 2.5)])
def test_and_it_costs_a_bit_an_element_at_most(name: str, least: float) -> None:
    torch.manual_seed(0)
    model, x = Deciding(CASES[name]), torch.randn(64, 256)
    store = ActivationStore(model, "int8", min_bytes=0)
    store.compile(backend="aot_eager")
    input_gradient(model, x, store)
    sites = [site for site in store.report().sites if site.stored_bytes and site.decision == "int8"]
    assert sites
    assert sum(site.saved_bytes for site in sites) > least * sum(site.stored_bytes for site in sites)


def test_what_only_compares_in_a_fused_operator_is_kept() -> None:
    model, x = Deciding(F.hardtanh), torch.randn(64, 256)
    store = ActivationStore(model, "int8", min_bytes=0)
    store.compile(backend="aot_eager")
    input_gradient(model, x, store)
    notes = {site.note for site in store.report().sites}
    assert "kept: backward decides by it in hardtanh_backward" in notes


class Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.block = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.block(x)
        return found


@pytest.mark.parametrize("name", CASES)
def test_what_passes_is_the_same_where_a_recomputed_module_goes_on_from_a_result_with_a_loss(name: str) -> None:
    torch.manual_seed(0)
    model, x = Inside(Deciding(CASES[name], product=True)), torch.randn(64, 256)
    x[:, ::4] *= 1e-4
    wanted = input_gradient(model, x, None)
    store = ActivationStore(model, "block/@matmul : int4; block : recompute", min_bytes=0)
    store.compile(backend="aot_eager")
    check_same({"x": input_gradient(model, x, store)}, {"x": wanted})
    assert name != "relu" or any(site.stored_bytes for site in store.report().sites if site.decision == "int4")
