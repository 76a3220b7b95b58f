"""The names of a model's modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from actstore.model.names import named_modules


def shared() -> nn.Module:
    """A module in two places, one without, one in a loop, and containers in containers."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.ModuleDict({"a": inner, "b": nn.ModuleList([inner[0], nn.Sequential(inner)])})
    model.register_module("none", None)
    model["b"].register_module("back", model)
    return model


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), nn.Dropout())


def parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.ParameterList([torch.ones(1)]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize(
    "make", [nn.Identity, shared, scripted, parametrized, lambda: nn.Transformer(8, 2, 2, 2, 8, batch_first=True)]
)
def test_they_are_those_of_pytorch(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert named_modules(model) == list(model.named_modules())


class DistributedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.other = nn.Identity()


@pytest.mark.parametrize("level", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_wrappers_add_no_level(level: str) -> None:
    """Not even within each other, and other attributes of a wrapper keep their names."""
    wrapper = nn.Module()
    inner = nn.Sequential(nn.Linear(2, 2))
    wrapper.register_module(level, inner)
    model = DistributedDataParallel(nn.ModuleDict({"block": wrapper, "module": nn.Identity()}))
    assert [name for name, _ in named_modules(model)] == ["", "", "block", "block", "block.0", "module", "other"]
    assert dict(named_modules(model))["block"] is inner
