"""A step whose errors are sampled needs hardly more memory than its neighbors, the first step included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from actstore import ActivationStore, Disk, SampleErrors, tag
from actstore.bench.workloads import gpt
from actstore.bench.workloads.workload import Workload

MORE = 1.05  # times the peak of a step that is not sampled


class Mixture(nn.Module):
    """Two experts for each token, of fixed shapes."""

    def __init__(self, width: int = 64, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def peaks(model: nn.Module, batch: tuple[Tensor, ...], policy: str, folder: str, loss) -> list[int]:
    store = ActivationStore(model, policy, observe=[SampleErrors(every=4)], tiers=[Disk(folder)])
    found = []
    for _ in range(5):
        with store:
            value = loss(*batch)
        value.backward()
        found.append(store.report().peak_held_bytes)
    effect = store.report().gradients
    assert effect is not None
    told = [site for site in effect.sites if site.variance is not None]
    assert len(told) >= 0.6 * len(effect.sites)
    store.close()
    return found


@pytest.mark.parametrize("policy", ["int8", "int4", "int8 @ host"])
def test_of_a_transformer(policy: str, tmp_path: Path) -> None:
    job = gpt.KIND.make(Workload(layers=4, width=128, heads=4, context=128, batch=24))
    found = peaks(job.model, job.batch(0), policy, str(tmp_path), job.loss)
    assert max(found[0], found[4]) <= MORE * found[2], found


def test_of_a_mixture_of_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Mixture() for _ in range(4)))
    batch = (torch.randn(32, 128, 64),)
    found = peaks(model, batch, "int8", str(tmp_path), lambda x: model(x).square().mean())
    assert max(found[0], found[4]) <= MORE * found[2], found


def test_a_factor_that_is_kept_leaves_the_rest_of_the_prediction() -> None:
    """It cannot be cut to a part: the product is left out where it does not fit in whole, and no other site is."""

    class Gated(nn.Module):
        def __init__(self, width: int = 256) -> None:
            super().__init__()
            self.up, self.gate, self.down = (nn.Linear(a, b) for a, b in ((width, 1024), (width, 1024), (1024, width)))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x) * tag(self.gate(x), "gate"))

    torch.manual_seed(0)
    model = nn.Sequential(*(Gated() for _ in range(3)))
    store = ActivationStore(model, "*/gate : keep; * : int8", min_bytes=0)
    with store:
        loss = model(torch.randn(1024, 256)).square().mean()
    loss.backward()
    effect = store.report().gradients
    assert effect is not None
    assert {site.reason for site in effect.sites} <= {"", "no room to run its reader once more"}
    assert all(site.variance is not None for site in effect.sites if site.site.endswith("down[0]"))
    store.close()
