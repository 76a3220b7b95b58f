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


def held_bytes(policy: str, backend: str = "aot_eager") -> int:
    torch._dynamo.reset()
    model, x, store = compiled(Mlp, policy, backend=backend)
    gradients(model, x, store)
    return store.report().held_bytes


def test_what_is_saved_is_between_all_and_the_inputs_of_regions() -> None:
    few, some, most, every = (
        held_bytes(f"{rule}blocks.* : recompute")
        for rule in ("", "*/@aten.gelu : keep; ", "*/@matmul : keep; ", "*/@aten.* : keep; ")
    )
    assert few < some < most < every == held_bytes("keep")


@pytest.mark.slow
def test_of_operators_that_inductor_takes_apart_the_result_is_saved() -> None:
    wanted = plain(Mlp, backend="inductor")
    torch._dynamo.reset()
    model, x, store = compiled(Mlp, "*/@aten.gelu : keep; blocks.* : recompute", backend="inductor")
    assert error(gradients(model, x, store), wanted) < 1e-6
    result = x.nbytes * 4
    assert store.report().held_bytes == held_bytes("blocks.* : recompute", "inductor") + 3 * result


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


class Several(nn.Module):
    """Attention and a maximum, which have several results, the first of them named."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norms = nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        seen = tag(nn.functional.scaled_dot_product_attention(q, k, v), "seen")
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x * tag(x.max(-1, keepdim=True).values, "most")


class SeveralNet(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Several() for _ in range(2))


BATCHES[SeveralNet] = lambda: torch.randn(4, 32, WIDTH)


@pytest.mark.parametrize(
    "rule", ["*/seen : keep", "*/most : keep", "*/@norm : keep", "*/@aten.max : keep", "*/@sdpa : keep"]
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_operators_of_several_results(rule: str, backend: str) -> None:
    wanted = plain(SeveralNet, backend=backend)
    torch._dynamo.reset()
    model, x, store = compiled(SeveralNet, f"{rule}; blocks.* : recompute", backend=backend)
    found = gradients(model, x, store)
    if backend == "aot_eager":
        check_same(found, wanted)
        counted = calls(model, x, store)[SDPA]
        assert counted == (2 if rule in ("*/seen : keep", "*/@sdpa : keep") else 4)
    assert error(found, wanted) < 1e-6
    check_drained(store)


class Noise(nn.Module):
    """Noise that backward needs nowhere, where the tensor behind it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        noisy = tag(self.up(x) + torch.randn_like(x), "noisy")
        return self.down(nn.functional.dropout(torch.softmax(noisy, -1), 0.25))


class NoiseNet(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noise() for _ in range(2))


BATCHES[NoiseNet] = BATCHES[Mlp]


@pytest.mark.parametrize("rule", ["", "*/noisy : keep; ", "*/@aten._softmax : keep; ", "*/@matmul : keep; "])
def test_noise_in_front_of_what_is_kept_is_drawn_once(rule: str) -> None:
    wanted = plain(NoiseNet)
    model, x, store = compiled(NoiseNet, f"{rule}blocks.* : recompute")
    for _ in range(2):
        check_same(gradients(model, x, store), wanted)
        check_drained(store)


def test_a_product_of_a_product_is_a_result_of_its_own() -> None:
    """As of low-rank weights."""

    class Low(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(x @ self.a @ self.b)

    class LowNet(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Low() for _ in range(2))

    BATCHES[LowNet] = BATCHES[Mlp]
    wanted = plain(LowNet)
    model, x, store = compiled(LowNet, "*/@matmul : keep; blocks.* : recompute")
    check_same(gradients(model, x, store), wanted)
    plain_model, _ = make(LowNet)
    plain_model.compile(backend="aot_eager")
    with torch.profiler.profile() as profile:
        gradients(plain_model, x)
    count = sum(event.name == "aten::mm" for event in profile.events())
    assert calls(model, x, store)["aten::mm"] == count


@pytest.mark.slow
def test_a_result_in_half_precision_that_inductor_takes_apart_is_saved() -> None:
    def held(policy: str) -> int:
        torch._dynamo.reset()
        model, x = make(Mlp)
        model, x = model.bfloat16(), x.bfloat16()
        store = ActivationStore(model, policy, min_bytes=0)
        store.compile()
        gradients(model, x, store)
        return store.report().held_bytes

    x = BATCHES[Mlp]()
    more = held("*/@aten.gelu : keep; blocks.* : recompute") - held("blocks.* : recompute")
    assert more == 3 * 4 * x.numel() * 2
