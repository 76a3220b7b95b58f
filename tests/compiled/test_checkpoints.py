"""Compiled models that call `torch.utils.checkpoint` themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

from actstore import ActivationStore
from actstore.autograd import modules
from tests.autograd.checks import check_drained, check_same
from tests.compiled.models import error

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself
POLICIES = "keep", "int8", "raw @ disk", "blocks.0 : recompute; * : keep"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(64, 64), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x)).tanh()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(64, 64), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def make() -> tuple[nn.Module, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Checkpointed(), torch.randn(8, 64)


def gradients(model: nn.Module, x: Tensor, store: ActivationStore | None = None) -> dict[str, Any]:
    model.zero_grad()
    torch.manual_seed(1)
    if store is None:
        loss = model(x).square().mean()
    else:
        with store:
            loss = model(x).square().mean()
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_gradients_are_those_of_plain_compilation(policy: str, ours: bool, whole: bool) -> None:
    """The whole model is compiled, or each block.

    While the compiler traces, PyTorch's mode of a checkpoint is active, and caches nothing that waits. In backward the
    checkpoint runs the code of blocks again, outside of the store: the code that forward ran.
    """

    def parts(model: nn.Module) -> list[Any]:
        return [model] if whole else [*model.blocks]  # type: ignore[misc]

    model, x = make()
    for part in parts(model):
        part.compile(backend="aot_eager")
    wanted = gradients(model, x)
    model, x = make()
    store = ActivationStore(model, policy, min_bytes=0)
    for part in parts(model):
        if ours:
            store.compile(part, backend="aot_eager")
        else:
            part.compile(backend="aot_eager")
    for _ in range(2):
        found = gradients(model, x, store)
        if policy == "int8":
            assert error(found, wanted) < 0.02
        else:
            check_same(found, wanted)
        check_drained(store)


def test_the_hooks_of_modules_stay_as_long_as_a_graph() -> None:
    model, x = make()
    store = ActivationStore(model, "keep")
    model(x)
    assert not modules._graphs
    assert not hooks._global_forward_hooks
    for _ in range(2):
        with store:
            loss = model(x).sum()
        with store:
            other = model(x).sum()
        assert len(hooks._global_forward_hooks) == len(hooks._global_forward_pre_hooks) == 1
        loss.backward()
        model(x)
        assert len(hooks._global_forward_hooks) == 1
        del other
        model(x)  # the first call behind the last graph removes them
        assert not modules._graphs
        assert not hooks._global_forward_hooks
    with store, torch.no_grad():
        model(x)
    assert not hooks._global_forward_hooks
