"""Forward mode over backward through modules under `recompute`, which then run once."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from actstore import ActivationStore
from tests.autograd.checks import check_same

DECISIONS = ["recompute", "recompute(raw @ disk)", "recompute(segment=2)"]


def dual_gradients(model, x, store=None):
    torch.manual_seed(1)
    tensors = [x, *model.parameters()]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.detach().cos())
        if store is None:
            loss = model(dual).square().sum()
        else:
            with store:
                loss = model(dual).square().sum()
        pairs = [forward_ad.unpack_dual(grad) for grad in torch.autograd.grad(loss, tensors)]
    return [tensor for pair in pairs for tensor in pair]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("decision", DECISIONS)
def test_tangents_of_gradients_are_those_without_a_store(decision):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.2), nn.Tanh()) for _ in range(3)]
    model, x = nn.Sequential(*blocks), torch.randn(5, 8, requires_grad=True)
    store = ActivationStore(model, f"* : {decision}", min_bytes=0)
    check_same(dual_gradients(model, x, store), dual_gradients(model, x))
