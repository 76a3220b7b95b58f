"""Backward of several gradients at once (`is_grads_batched`) through recomputed modules."""

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from tests.autograd.checks import check_same

DECISIONS = ["recompute", "recompute(raw @ disk)", "recompute(segment=2)", "recompute(schedule=revolve, slots=1)"]


def batched(model, x, store=None):
    torch.manual_seed(1)
    if store is None:
        y = model(x)
    else:
        with store:
            y = model(x)
    vectors = torch.arange(3.0 * y.numel()).view(3, *y.shape).cos()
    grads = torch.autograd.grad(y, [x, *model.parameters()], vectors, is_grads_batched=True)
    return [*grads, torch.rand(())]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("decision", DECISIONS)
def test_random_numbers_are_drawn_again(decision):
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.BatchNorm1d(8), nn.Tanh())  # noqa: E731
    model, x = nn.Sequential(*(block() for _ in range(4))), torch.randn(5, 8, requires_grad=True)
    check_same(batched(model, x, ActivationStore(model, f"* : {decision}", min_bytes=0)), batched(model, x))
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    assert level == 1  # no vmap is left
