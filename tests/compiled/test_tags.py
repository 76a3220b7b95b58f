"""Tags of models inside of compiled graphs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actstore import ActivationStore, tag
from actstore.compiled.rules import GraphRules
from tests.autograd.checks import check_drained, check_same
from tests.compiled.models import error, gradients

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself


class Tagged(nn.Module):
    def __init__(self, name: str = "mid") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * torch.tanh(self.first(x))
        return self.second(tag(y, self.name) if self.name else y)


def made(name: str, policy: str = "", backend: str = "aot_eager") -> tuple[nn.Module, Tensor, ActivationStore | None]:
    """A compiled model with a tag, or without one, its batch, and its store if it has a policy."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Tagged(name), torch.randn(4, 16, 64)
    if not policy:
        model.compile(backend=backend, fullgraph=True)
        return model, x, None
    store = ActivationStore(model, policy, min_bytes=0)
    store.compile(backend=backend, fullgraph=True)
    return model, x, store


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_rule_for_a_tag_is_for_what_the_graph_saves_of_it(backend: str) -> None:
    wanted = gradients(*made("", backend=backend))
    model, x, store = made("mid", "*/mid : int8; * : keep", backend)
    assert store is not None
    for _ in range(2):
        assert 0 < error(gradients(model, x, store), wanted) < 0.02
        check_drained(store)
    stored = [(site.site, site.decision) for site in store.report().sites if site.stored_bytes]
    assert stored == [("second/mid[0]", "int8")]


def test_a_rule_for_another_tag_is_for_nothing() -> None:
    model, x, store = made("mid", "*/other : int8; * : keep")
    check_same(gradients(model, x, store), gradients(*made("")))
    assert store is not None
    assert store.report().stored_bytes == 0


def test_without_a_store_a_tag_breaks_no_graph_and_changes_nothing() -> None:
    check_same(gradients(*made("mid")), gradients(*made("")))


def test_models_with_other_tags_share_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    digest = GraphRules.digest

    def watch(*arguments: Any) -> str:
        found.append(digest(*arguments))
        return found[-1]

    monkeypatch.setattr(GraphRules, "digest", watch)
    for name in ("mid", "other", "", "mid"):
        gradients(*made(name, "*/mid : int8; * : keep"))
    assert len(set(found)) == 3
    assert found[0] == found[3]


def test_a_name_that_no_rule_can_have() -> None:
    model, x, store = made("no name", "int8")
    with pytest.raises(Exception, match="must be one word"):
        gradients(model, x, store)
