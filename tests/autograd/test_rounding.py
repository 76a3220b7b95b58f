"""Random rounding in training: the same program gives the same gradients, and torch's generators are not touched."""

import pytest
import torch

from actstore import ActivationStore
from tests.autograd.checks import check_drained, check_same, train_step
from tests.autograd.models import build

POLICIES = [
    "int8(round=stochastic)",
    "int4(round=dither) @ host",
    "int2 @ disk",
    "zmask(int4(round=stochastic))",
    "hadamard128(int4)",
    "recompute(int8(round=stochastic))",
]


def train(policy, seed, steps=2):
    model, batch = build("dropout")
    store = ActivationStore(model, policy, min_bytes=0, seed=seed)
    found = [train_step(model, batch, store, seed=step) for step in range(steps)]
    check_drained(store)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_the_seed_decides_the_gradients(policy):
    first, again, other = train(policy, 0), train(policy, 0), train(policy, 1)
    for one, same in zip(first, again, strict=True):
        check_same(one, same)
    with pytest.raises(AssertionError, match="differs"):
        check_same(first[0].grads, other[0].grads)


@pytest.mark.parametrize("policy", POLICIES)
def test_generators_are_not_touched(policy):
    model, batch = build("dropout")
    store = ActivationStore(model, policy, min_bytes=0)
    torch.manual_seed(5)
    with store:
        model(*batch)
    found = torch.rand(3)
    torch.manual_seed(5)
    model(*batch)
    assert torch.equal(found, torch.rand(3))
