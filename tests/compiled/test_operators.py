"""Rules that name operators, in compiled graphs."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from tests.autograd.checks import check_same
from tests.compiled.models import Heads, Mlp, compiled, gradients, plain

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself


def kept_by(policy: str, kind: type[Mlp] = Mlp, backend: str = "aot_eager") -> set[str]:
    torch._dynamo.reset()
    model, x, store = compiled(kind, policy, backend=backend)
    gradients(model, x, store)
    return {str(row.site) for row in store.report().sites if row.decision == "keep"}


@pytest.mark.parametrize(
    ("operator", "sites"),
    [
        ("matmul", {"blocks.0[0]", "blocks.1[0]", "blocks.2[0]"}),
        ("aten.gelu", {"blocks.0.down[0]", "blocks.1.down[0]", "blocks.2.down[0]"}),
        ("sdpa", set()),
    ],
)
def test_a_rule_covers_what_its_operator_made(operator: str, sites: set[str]) -> None:
    assert kept_by(f"*/@{operator} : keep; * : int8") == sites
    inner = {site for site in sites if site.startswith("blocks.1")}
    assert kept_by(f"blocks.1*/@{operator} : keep; * : int8") == inner


def test_attention_and_products_through_views() -> None:
    kept = kept_by("*/@sdpa : keep; */@matmul : keep; * : int8", Heads)
    assert kept_by("*/@sdpa : keep; * : int8", Heads) < kept
    assert kept_by("* : int8", Heads) == set()


def test_all_kept_by_operators_is_plain() -> None:
    wanted = plain(Mlp)
    torch._dynamo.reset()
    model, x, store = compiled(Mlp, "*/@aten.* : keep; * : int8")
    check_same(gradients(model, x, store), wanted)


@pytest.mark.slow
def test_inductor_keeps_code_of_other_operators_apart() -> None:
    with fresh_cache():
        counters.clear()
        assert kept_by("*/@aten.gelu : keep; * : int8", backend="inductor") != kept_by("* : int8", backend="inductor")
        assert counters["aot_autograd"]["autograd_cache_hit"] == 0
