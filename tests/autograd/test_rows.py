"""Gradients where the rows of saved tensors differ in scale, as class tokens and patches do."""

import pytest
import torch
from torch import Tensor, nn

from actstore import ActivationStore

TOKENS = 33
CLASS_TOKEN = 0.02  # times a patch


class ClassToken(nn.Module):
    """A residual block over tokens of `width`, and a head that reads the first one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.down(nn.functional.gelu(self.up(x))))[:, 0])


def gradient_error(width: int, policy: str) -> float:
    torch.manual_seed(0)
    model, x = ClassToken(width), torch.randn(16, TOKENS, width)
    x[:, 0] *= CLASS_TOKEN
    found = []
    for each in ("keep", policy):
        model.zero_grad()
        with ActivationStore(model, each, min_bytes=0):
            loss = model(x.clone().requires_grad_()).square().mean()
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return float((found[1] - found[0]).norm() / found[0].norm())


@pytest.mark.parametrize("policy", ["int8", "int8(affine)", "fp8", "int4", "nf4", "hadamard128(int8)"])
@pytest.mark.parametrize("width", [49, 152])
def test_a_width_that_groups_do_not_divide_costs_no_more(policy: str, width: int) -> None:
    assert gradient_error(width, policy) < 1.25 * gradient_error(128, policy)


class SquaredParts(nn.Module):
    """The squares of three parts of a copy, which is `whole`."""

    def forward(self, x: Tensor) -> Tensor:
        self.whole = x * 1
        self.whole.retain_grad()
        return torch.stack([(part * part).sum() for part in self.whole.chunk(3, 1)]).sum()


@pytest.mark.parametrize("width", [152, 64])
def test_parts_of_one_storage_keep_its_rows(width: int) -> None:
    """Queries, keys and values share the payload of the projection that they are parts of."""
    torch.manual_seed(0)
    x = torch.randn(64, 3 * width) * torch.logspace(-3, 0, 64)[torch.randperm(64)].unsqueeze(1)
    model = SquaredParts()
    with ActivationStore(model, "int8", min_bytes=0) as store:
        loss = model(x.requires_grad_())
    loss.backward()
    y = model.whole.detach()
    assert y.numel() < store.report().stored_bytes < 1.1 * y.numel()
    assert model.whole.grad is not None
    assert ((model.whole.grad / 2 - y).abs().amax(1) <= 0.51 / 127 * y.abs().amax(1)).all()
