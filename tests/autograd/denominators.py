"""Norms as models write them, where the statistics of rows differ by a thousand: of a large first token."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actstore import ActivationStore

WIDTH = 64


def _centered(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "rsqrt": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "pow": lambda x: x * torch.pow(x.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5),
    "sqrt": lambda x: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "std": lambda x: x / (x.std(-1, keepdim=True) + 1e-6),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "norm of rows": lambda x: x / x.norm(dim=-1)[..., None],
    "normalize": lambda x: F.normalize(x, dim=-1),
    "normalize in the middle": lambda x: F.normalize(x.transpose(1, 2), dim=1).transpose(1, 2),
    "reciprocal": lambda x: x * torch.reciprocal(x.abs().sum(-1, keepdim=True) + 1e-6),
    "sum": lambda x: F.relu(x) / (F.relu(x).sum(-1, keepdim=True) + 1e-6),
    "exp": lambda x: x / torch.exp(x.abs().mean(-1, keepdim=True).log()),
    "log": lambda x: x * torch.log(x.abs().sum(-1, keepdim=True) + 1e-6),
    "float_power": lambda x: (x * torch.float_power(x.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)).float(),
    "centered": lambda x: _centered(x) / torch.sqrt(_centered(x).pow(2).mean(-1, keepdim=True) + 1e-6),
    "of one size": lambda x: x / (x.abs() + 0.01),
    "in place": lambda x: (x * 1).div_(x.square().mean(-1, keepdim=True).add_(1e-6).sqrt_()),
}
FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
}


class Between(nn.Module):
    """A form between two linear layers."""

    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.form = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), form

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.form(self.a(x)))
        return out


@cache
def fused_error(policy: str, *, compiled: bool) -> float:
    """Return the larger relative error of the fused norms."""
    return max(gradient_error(form, policy, compiled=compiled) for form in FUSED.values())


def gradient_error(form: Callable[[Tensor], Tensor], policy: str, *, compiled: bool) -> float:
    """Return the relative error of all gradients together."""
    torch.manual_seed(0)
    plain, x = Between(form), torch.randn(2, 512, WIDTH)
    x[:, ::64] *= 1000
    model = deepcopy(plain)
    plain(x).square().mean().backward()
    store = ActivationStore(model, policy, min_bytes=0)
    if compiled:
        store.compile(backend="aot_eager")
    with store:
        loss = model(x).square().mean()
    loss.backward()
    store.close()
    found, wanted = (torch.cat([p.grad.flatten() for p in each.parameters()]).double() for each in (model, plain))
    return float((found - wanted).norm() / wanted.norm())
