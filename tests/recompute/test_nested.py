"""A recomputed region inside of a part that does not run again with the region around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

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


def train(policy: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    part = nn.Sequential(Counted(), nn.Linear(8, 8))
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
