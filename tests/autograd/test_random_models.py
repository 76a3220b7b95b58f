"""Random models under random policies, trained in random ways: all that training leaves is that of plain training.

``python -m tests.autograd.test_random_models --examples N`` draws N others at random.
"""

from __future__ import annotations

import argparse
import importlib
import random
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from actstore import ActivationStore, PolicyError, replay
from actstore.generators import Generators
from actstore.weights import Weights
from tests.autograd.checks import check_drained, check_same, gc_off
from tests.autograd.random_models import WIDTH, Tree, build, trees

pytestmark = pytest.mark.usefixtures("one_thread")

STORED = ("keep", "raw", "raw @ disk", "raw @ host > disk", "expack", "zmask", "derive", "derive(raw @ disk)")
RECOMPUTED = ("recompute", "recompute(raw)", "recompute(raw @ disk)", "recompute(expack)")
CHAINS = ("recompute(segment=2)", "recompute(schedule=sqrt)", "recompute(schedule=revolve, slots=1)")
WAYS = ("one", "inside", "two at once", "retained", "differentiated twice", "of some", "fixed input")


@st.composite
def policies(draw: st.DrawFn, model: nn.Module) -> str:
    """One rule for a sequence of modules, or some for modules that the model has, the inner ones first."""
    modules = dict(model.named_modules())
    rules: list[tuple[str, tuple[str, ...]]] = []
    if draw(st.integers(0, 2)) == 0:
        chains = [name for name, module in modules.items() if name and isinstance(module, nn.Sequential)]
        rules.append((draw(st.sampled_from(chains)) + ".*", CHAINS))
    else:
        names = draw(st.lists(st.sampled_from(list(modules)[1:]), min_size=1, max_size=3, unique=True))
        kinds = st.sampled_from([STORED, RECOMPUTED])
        rules += [(name, draw(kinds)) for name in sorted(names, key=lambda name: -name.count("."))]
    rules.append(("*", STORED))
    return "; ".join(f"{pattern} : {draw(st.sampled_from(decisions))}" for pattern, decisions in rules)


def train(model: nn.Module, store: ActivationStore | None, way: str, dtype: torch.dtype, autocast: bool) -> list[Any]:
    """Two steps; losses, gradients, parameters, buffers, and where the random numbers have got to."""
    torch.manual_seed(1)
    random.seed(1)
    found: list[Any] = []
    for _ in range(2):
        inputs, losses = [], []
        for _ in range(2 if way == "two at once" else 1):
            x = torch.randn(2, 4, WIDTH, dtype=dtype, requires_grad=way != "fixed input")
            with (
                store or nullcontext(),
                torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(),
            ):
                loss = model(x).float().square().mean()
                if way == "inside" and loss.requires_grad:
                    loss.backward()
            inputs.append(x)
            losses.append(loss)
        found += [loss.detach() for loss in losses]
        backward(way, losses, [*model.parameters(), *inputs])
        found += [x.grad for x in inputs]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
    found += [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    return [*found, torch.get_rng_state(), torch.tensor(random.random())]


def backward(way: str, losses: list[Tensor], tensors: list[Tensor]) -> None:
    losses = [loss for loss in losses if loss.requires_grad and way != "inside"]
    tensors = [tensor for tensor in tensors if tensor.requires_grad]
    for loss in reversed(losses):
        if way == "retained":
            loss.backward(retain_graph=True)
        if way == "differentiated twice":
            grads = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
            loss = sum((g.square().sum() for g in grads if g is not None and g.requires_grad), torch.zeros(()))
            if not loss.requires_grad:
                continue
        if way == "of some":
            for tensor, grad in zip(
                tensors[::2], torch.autograd.grad(loss, tensors[::2], allow_unused=True), strict=True
            ):
                tensor.grad = grad
        else:
            loss.backward()


def check(
    forest: list[Tree], data: st.DataObject, way: str, dtype: torch.dtype, autocast: bool, options: dict[str, Any]
) -> None:
    try:
        wanted = train(build(forest, dtype), None, way, dtype, autocast)
    except (RuntimeError, UserWarning):  # no model that can be trained so
        reject()
    model = build(forest, dtype)
    policy = data.draw(policies(model))
    try:
        store = ActivationStore(model, policy, **options)
    except PolicyError:
        reject()
    with gc_off():
        check_same(train(model, store, way, dtype, autocast), wanted)
        check_drained(store)
    store.close()


ARGUMENTS = {
    "forest": st.lists(trees(), min_size=1, max_size=6),
    "data": st.data(),
    "way": st.sampled_from(WAYS),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "autocast": st.booleans(),
    "options": st.fixed_dictionaries(
        {"min_bytes": st.sampled_from([0, 200])},
        optional={
            "window": st.sampled_from([1, 8192]),
            "host_budget": st.sampled_from([0, 4096]),
            "when_full": st.sampled_from(["keep", "spill"]),
            "verify": st.just(True),
        },
    ),
}


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(**ARGUMENTS)
def test_all_that_training_leaves_is_that_of_plain_training(**arguments: Any) -> None:
    check(**arguments)


def loses(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    patch.setattr(owner, name, lambda *_: None)


def loses_history(patch: pytest.MonkeyPatch) -> None:
    """Inputs that required a gradient come back without."""
    patch.setattr(replay, "_fresh", lambda tensor, **_: tensor.detach())


PLANTED = {
    "random numbers go on": lambda patch: loses(patch, Generators, "rewind"),
    "random numbers stay back": lambda patch: loses(patch, Generators, "resume"),
    "buffers are updated twice": lambda patch: loses(patch, Weights, "rewind"),
    "buffers stay back": lambda patch: loses(patch, Weights, "resume"),
    "inputs without history": loses_history,
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = settings(max_examples=200, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    with monkeypatch.context() as patch:
        PLANTED[bug](patch)
        with pytest.raises((AssertionError, RuntimeError)):
            draw(given(**ARGUMENTS)(check))()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000)
    warnings.simplefilter("error", UserWarning)
    importlib.import_module("torch._dynamo")  # on its first use it would be imported, and keep frames for the collector
    torch.set_num_threads(1)
    drawn = settings(
        max_examples=parser.parse_args().examples, derandomize=False, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), print_blob=True,
    )  # fmt: skip
    drawn(given(**ARGUMENTS)(check))()


if __name__ == "__main__":
    main()
