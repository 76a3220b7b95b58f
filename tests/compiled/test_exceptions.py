"""Operators and tagged tensors that do not run again inside of recomputed modules of compiled graphs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from actstore import ActivationStore, tag
from tests.autograd.checks import check_drained, check_same
from tests.compiled.models import BATCHES, WIDTH, Heads, Mlp, compiled, error, gradients, make, plain

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself
SDPA, PRODUCT = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::addmm"


def calls(model: nn.Module, x: Tensor, store: ActivationStore) -> Counter[str]:
    with torch.profiler.profile() as profile:
        gradients(model, x, store)
    return Counter(event.name for event in profile.events())


@pytest.mark.parametrize(
    ("rule", "sdpa", "products"),
    [
        ("", 8, 14),
        ("blocks.*/@sdpa : keep; ", 4, 14),
        ("blocks.*/@sdpa : raw @ disk; ", 4, 14),
        ("blocks.*/@matmul : keep; ", 8, 9),
        ("blocks.*/@matmul : raw @ disk; blocks.*/@sdpa : keep; ", 4, 9),
        ("blocks.1/@sdpa : keep; ", 7, 14),
    ],
)
def test_operators_with_a_rule_run_once_and_gradients_are_plains(rule: str, sdpa: int, products: int) -> None:
    wanted = plain(Heads)
    model, x, store = compiled(Heads, f"{rule}blocks.* : recompute")
    for _ in range(2):
        check_same(gradients(model, x, store), wanted)
        check_drained(store)
    counted = calls(model, x, store)
    assert (counted[SDPA], counted[PRODUCT]) == (sdpa, products)


def saved_bytes(policy: str, backend: str = "aot_eager") -> int:
    torch._dynamo.reset()
    model, x, store = compiled(Mlp, policy, backend=backend)
    gradients(model, x, store)
    return store.report().saved_bytes


def test_what_is_saved_is_between_all_and_the_inputs_of_regions() -> None:
    few, some, most, every = (
        saved_bytes(f"{rule}blocks.* : recompute")
        for rule in ("", "*/@aten.gelu : keep; ", "*/@matmul : keep; ", "*/@aten.* : keep; ")
    )
    assert few < some < most < every == saved_bytes("keep")


@pytest.mark.slow
def test_of_operators_that_inductor_takes_apart_the_result_is_saved() -> None:
    wanted = plain(Mlp, backend="inductor")
    torch._dynamo.reset()
    model, x, store = compiled(Mlp, "*/@aten.gelu : keep; blocks.* : recompute", backend="inductor")
    assert error(gradients(model, x, store), wanted) < 1e-6
    result = x.nbytes * 4
    assert store.report().saved_bytes == saved_bytes("blocks.* : recompute", "inductor") + 3 * result


def test_a_result_with_a_loss_is_that_of_its_rule() -> None:
    wanted = plain(Mlp)
    model, x, store = compiled(Mlp, "*/@matmul : int8; blocks.* : recompute")
    found = error(gradients(model, x, store), wanted)
    eager, x = make(Mlp)
    inside = ActivationStore(eager, "*/@matmul : int8; blocks.* : recompute", min_bytes=0)
    assert 0 < found < 2 * error(gradients(eager, x, inside), wanted)
    check_drained(store)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(tag(nn.functional.silu(self.up(x)), "hidden"))


class NamedNet(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Named() for _ in range(3))


BATCHES[NamedNet] = BATCHES[Mlp]


@pytest.mark.parametrize("rule", ["keep", "raw @ disk"])
def test_a_tagged_tensor_with_a_rule_is_not_computed_again(rule: str) -> None:
    wanted = plain(NamedNet)
    counts = []
    for policy in (
        "blocks.* : recompute",
        f"*/hidden : {rule}; blocks.* : recompute",
        "*/other : keep; blocks.* : recompute",
    ):
        torch._dynamo.reset()
        model, x, store = compiled(NamedNet, policy)
        check_same(gradients(model, x, store), wanted)
        check_drained(store)
        counts.append(calls(model, x, store)["aten::silu"])
    assert counts == [6, 3, 6]
    sites = [str(site.site) for site in store.report().sites]
    assert sites
