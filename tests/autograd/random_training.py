"""Random policies for a model, and ways to train it."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from actstore import ActivationStore, Disk, Host, Verify, Window
from tests.autograd.random_models import WIDTH

STORED = ("keep", "raw", "raw @ disk", "raw @ host > disk", "expack", "zmask", "derive", "derive(raw @ disk)")
RECOMPUTED = ("recompute", "recompute(raw)", "recompute(raw @ disk)", "recompute(expack)")
CHAINS = ("recompute(segment=2)", "recompute(schedule=sqrt)", "recompute(schedule=revolve, slots=1)")
INNER = ("@matmul", "@sdpa", "@activation", "@norm", "@conv", "@aten.*", "@aten.mul", "marked")
WAYS = ("one", "inside", "two at once", "retained", "differentiated twice", "of some", "fixed input")


@st.composite
def policies(draw: st.DrawFn, model: nn.Module) -> str:
    """One rule for a sequence of modules, or some for modules that the model has, the inner ones first.

    A rule for a part of a recomputed module excepts it. Rules for operators and for a tag may come before all.
    """
    modules = dict(model.named_modules())
    rules: list[tuple[str, tuple[str, ...]]] = []
    if draw(st.integers(0, 2)) == 0:
        chains = [name for name, module in modules.items() if name and isinstance(module, nn.Sequential)]
        rules.append((draw(st.sampled_from(chains)) + ".*", CHAINS))
    else:
        names = draw(st.lists(st.sampled_from(list(modules)[1:]), min_size=1, max_size=3, unique=True))
        kinds = st.sampled_from([STORED, RECOMPUTED])
        rules += [(name, draw(kinds)) for name in sorted(names, key=lambda name: -name.count("."))]
    for word in draw(st.lists(st.sampled_from(INNER), max_size=2, unique=True)):
        rules.insert(0, (f"{draw(st.sampled_from(['*', *list(modules)[1:]]))}/{word}", STORED))
    rules.append(("*", STORED))
    return "; ".join(f"{pattern} : {draw(st.sampled_from(decisions))}" for pattern, decisions in rules)


def arguments_of(drawn: dict[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Return arguments of ActivationStore from `min_bytes`, `window`, `when_full`, `host_budget` and `verify`."""
    window = Window(drawn.get("window"), drawn.get("when_full", "wait"))
    return {
        "min_bytes": drawn["min_bytes"],
        "tiers": [Host(drawn.get("host_budget")), Disk(folder), window],
        "observe": [Verify()] if "verify" in drawn else [],
    }


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
