"""Recomputed regions inside of parts that do not run again, and parts that run again after all: state changes once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actstore import ActivationStore
from tests.autograd.checks import check_same

pytestmark = pytest.mark.usefixtures("one_thread")


class Counted(nn.Module):
    """Has a normalisation, a buffer that its forward writes to, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("seen", torch.zeros(8))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.add_(x.detach().mean(0))
        return self.norm(x) * self.count + self.seen.tanh()


class OwnHooks(nn.Sequential):
    """Saves copies, by hooks of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda packed: packed.clone()):
            return super().forward(x)


def train(policy: str | None, kind: type[nn.Sequential] = nn.Sequential) -> list[Tensor]:
    torch.manual_seed(0)
    part = kind(Counted(), nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(part, nn.Tanh()))
    store = None if policy is None else ActivationStore(model, policy, min_bytes=0)
    for _ in range(2):
        x = torch.randn(4, 8)
        if store is None:
            y = model(x)
        else:
            with store:
                y = model(x)
        y.square().mean().backward()
    return [*(p.grad for p in model.parameters()), *model.buffers(), torch.tensor(part[0].count)]


@pytest.mark.parametrize(
    "policy",
    [
        "1.0.0 : recompute; 1.0 : keep; 1 : recompute",
        "1.0.0 : recompute(raw @ disk); 1.0 : raw; 1 : recompute(raw)",
        "1.0.0.norm : raw; 1.0.0 : recompute; 1.0 : keep; 1 : recompute",
        "1.0.0.norm : recompute; 1.0.0 : keep; 1 : recompute",
    ],
)
def test_what_its_forward_changes_changes_once(policy: str) -> None:
    """Its normalisation counted a batch once more in backward."""
    check_same(train(policy), train(None))


@pytest.mark.parametrize("policy", ["1.0.0 : keep; 1 : recompute", "1.0.0.norm : raw @ disk; 1 : recompute(raw)"])
def test_a_part_below_hooks_of_the_model(policy: str) -> None:
    """It runs again with its region, and changed its buffers once more."""
    check_same(train(policy, OwnHooks), train(None, OwnHooks))
