"""PyTorch's flex_attention, whose backward comes from a higher-order operator."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from actstore import ActivationStore
from tests.autograd.checks import check_drained, check_same, train_step, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # it wants to be compiled, and then the compiler about itself


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        heads = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        seen = flex_attention(*heads, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.1)
        return self.out(seen.transpose(1, 2).flatten(2))


def build(device):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Attention()).to(device)
    return model, (torch.randn(2, 64, 32, device=device),)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("policy", ["raw @ host", "int8", "1 : recompute(raw)"])
def test_gradients_or_the_refusal_are_those_without_a_store(policy, device):
    model, batch = build(device)
    store = ActivationStore(model, policy, min_bytes=0)
    refused, wanted = verdict(lambda: train_step(model, batch))
    found = verdict(lambda: train_step(model, batch, store))
    assert found[0] == refused
    if refused == "error":  # there is no backward on a CPU
        assert found[1] == wanted
    else:
        assert store.report().stored_bytes > 0
        if policy != "int8":
            check_same(found[1], wanted)
    gc.collect()  # what tracebacks held
    check_drained(store)
    with torch.no_grad():
        plain = model(*batch)
        with store:
            check_same(model(*batch), plain)
