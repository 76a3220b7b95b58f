"""A step that is looked at goes on as any other, whatever its graph is made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from actstore import ActivationStore, SampleErrors
from actstore.accuracy.influence.prediction import BUILT_IN_NODE
from tests.autograd.checks import same_bits


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(16, 32, sparse=True)
        self.out = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        picked = self.rows((x[:, 0].abs() * 3).long())
        out: Tensor = self.out(torch.relu(picked))
        return out


class Through(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.Linear(32, 32), between, nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(torch.tanh(self.first(x))))
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sparse": (Sparse, "not predicted: some gradients are sparse_coo"),
    "complex": (lambda: Through(lambda x: torch.fft.fft(x).abs()), "not predicted: some gradients are complex64"),
    "float64": (lambda: Through(lambda x: x.double().square().float()), "predicted"),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_that_cannot_be_looked_at(name: str) -> None:
    make, said = MODELS[name]
    found = {}
    for every in (0, 1):
        torch.manual_seed(0)
        model = make()
        x = torch.randn(64, 32)
        store = ActivationStore(model, "int8", min_bytes=0, observe=[SampleErrors(every=every)])
        with store:
            loss = model(x).square().mean()
        loss.backward()
        grads = [weight.grad for weight in model.parameters()]
        found[every] = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]
        text = str(store.report().gradients)
        store.close()
    assert all(same_bits(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert said in text


def test_two_forwards_and_one_backward() -> None:
    torch.manual_seed(0)
    model = Through(torch.relu)
    store = ActivationStore(model, "int8", min_bytes=0, observe=[SampleErrors(every=200)])
    losses = []
    for _ in range(2):
        with store:
            losses.append(model(torch.randn(64, 32)).square().mean())
    sum(losses, torch.zeros(())).backward()
    effect = store.report().gradients
    assert effect is not None
    assert effect.variance > 0
    store.close()


def test_only_operators_of_pytorch_run_twice() -> None:
    assert BUILT_IN_NODE.fullmatch("AddmmBackward0")
    assert BUILT_IN_NODE.fullmatch("ScaledDotProductFlashAttentionForCpuBackward0")
    for others in (
        "torch::autograd::CppNode<Fused>",
        "CompiledFunctionBackward",
        "DoubledBackward",
        "torch::autograd::CopySlices",
    ):
        assert not BUILT_IN_NODE.fullmatch(others)


def test_a_compiled_function_around_the_model_stays_whole() -> None:
    torch.manual_seed(0)
    model = Through(torch.relu)
    with ActivationStore(model, "int8", min_bytes=0, observe=[SampleErrors(every=200)]):
        out = torch.compile(lambda x: model(x) * 2, fullgraph=True, backend="eager")(torch.randn(64, 32))
    assert torch.isfinite(out).all()
