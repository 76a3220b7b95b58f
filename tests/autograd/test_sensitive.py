"""The table of operators that amplify errors or decide: its names exist, and eager code and graphs both read it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actstore import ActivationStore
from actstore.autograd import sensitive
from actstore.autograd.deciders import chooses
from actstore.base.operators import aten_names

OF_INDUCTOR = {"prepare_softmax_online", "low_memory_max_pool_with_offsets", "low_memory_max_pool2d_with_offsets"}
TABLES = (
    sensitive.SIGNS, sensitive.COMPARISONS, sensitive.CHOICES, sensitive.DECIDE_BY_SIGN, sensitive.DECIDE_BY_VALUE,
    frozenset(sensitive.POLES), sensitive.EXPONENTIALS, sensitive.EXACT_RESULTS,
)  # fmt: skip


def test_names_are_those_of_operators_or_functions() -> None:
    operators = {name.strip("_") for name in aten_names()} | OF_INDUCTOR
    places = torch, F, Tensor, torch.linalg, torch.special
    for name in frozenset().union(*TABLES):
        assert name in operators or any(hasattr(place, name) for place in places), name


class Reading(torch.autograd.Function):
    """Its backward calls an operator that only graphs knew."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * F.max_pool2d(x[None], 3, 1, 1)[0]


def test_the_backward_of_a_function_chooses_by_what_graphs_choose_by() -> None:
    assert chooses(Reading, frozenset())


class Sign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
        return torch.linalg.vector_norm(h, dim=1, keepdim=True) * h.sign()


@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@pytest.mark.parametrize("compiled", [False, True])
def test_results_are_exact_in_eager_and_in_graphs(compiled: bool) -> None:
    store = ActivationStore(model := Sign(), "int8", min_bytes=0)
    if compiled:
        store.compile(backend="aot_eager")
    with store:
        loss = model(torch.randn(32, 64)).square().sum()
    loss.backward()
    notes = " ".join(site.note for site in store.report().sites).lower()
    assert "linalg_vector_norm" in notes or "linalgvectornorm" in notes
    assert compiled or "output of sign" in notes  # a graph computes signs again
