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
    """Its gradient is what `decide` lets through, and nothing else: the smooth part only saves `h` for backward."""

    def __init__(self, decide: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.decide = nn.Parameter(torch.ones(256)), decide

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
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
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_what_passes_is_what_passes_without_a_loss(name: str, policy: str) -> None:
    torch.manual_seed(0)
    model, x = Deciding(CASES[name]), torch.randn(64, 256)
    x[:, ::4] *= 1e-4  # far below a step
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
