"""Random policies for a model, and ways to train it."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu

from actstore import ActivationStore, Disk, Host, Verify, Window, tile
from tests.autograd.random_modules import WIDTH, Watched

STORED = ("keep", "raw", "raw @ disk", "raw @ host > disk", "expack", "zmask", "derive", "derive(raw @ disk)")
RECOMPUTED = ("recompute", "recompute(raw)", "recompute(raw @ disk)", "recompute(expack)")
TILED = ("recompute(tiles=2)", "recompute(raw, tiles=3)", "recompute(raw @ disk, tiles=2)")
CHAINS = ("recompute(segment=2)", "recompute(schedule=sqrt)", "recompute(schedule=revolve, slots=1)")
INNER = ("@matmul", "@sdpa", "@activation", "@norm", "@conv", "@aten.*", "@aten.mul", "marked")

LOSSY_CODECS = ("int8", "int8(round=stochastic)", "int4", "fp8", "e5m6", "nf4", "zmask(int8)")
_ENCODED = tuple(f"{codec}{tier}" for codec in LOSSY_CODECS for tier in ("", " @ host", " @ disk"))
LOSSY = (*_ENCODED, *(f"derive({decision})" for decision in _ENCODED[::2]))
LOSSY_RECOMPUTED = tuple(f"recompute({decision})" for decision in _ENCODED)

INSIDE = "inside", "differentiated twice inside"  # ways whose backward runs in the context of the store
BATCHED, DUAL, MUTATED = "batched", "forward over reverse", "mutation allowed"
OTHER_HOOKS = "hooks outside"  # of the store; plain training has none
WAYS = (
    "one", *INSIDE, "two at once", "retained", "differentiated twice", "of some", "into some", "fixed input",
    BATCHED, DUAL, MUTATED, "on threads", OTHER_HOOKS,
)  # fmt: skip
AROUND = {MUTATED: allow_mutation_on_saved_tensors, OTHER_HOOKS: save_on_cpu, DUAL: forward_ad.dual_level}
CHANGED = "modified by an inplace operation"  # what autograd says of a saved tensor


@st.composite
def policies(
    draw: st.DrawFn,
    model: nn.Module,
    stored: tuple[str, ...] = STORED,
    recomputed: tuple[str, ...] = RECOMPUTED,
    tiled: tuple[str, ...] = (),
) -> str:
    """One rule for a sequence of modules, or some for modules that the model has, the inner ones first.

    A rule for a part of a recomputed module excepts it, or runs it in tiles. Rules for operators and for a tag may come
    before all.
    """
    modules = dict(model.named_modules())
    rules: list[tuple[str, tuple[str, ...]]] = []
    if recomputed is RECOMPUTED and draw(st.integers(0, 2)) == 0:
        chains = [name for name, module in modules.items() if name and isinstance(module, nn.Sequential)]
        rules.append((draw(st.sampled_from(chains)) + ".*", CHAINS))
    else:
        names = draw(st.lists(st.sampled_from(list(modules)[1:]), min_size=1, max_size=3, unique=True))
        kinds = st.sampled_from([stored, recomputed])
        rules += [(name, draw(kinds)) for name in sorted(names, key=lambda name: -name.count("."))]
    pairs = [(inner, around) for inner in modules for around in modules if around and inner.startswith(f"{around}.")]
    if tiled and pairs:
        inner, around = draw(st.sampled_from(pairs))
        names = [name for name, _ in rules if not name.startswith((inner, f"{around}.*")) and name != around]
        parts = [(name, stored) for name in names if name.startswith(f"{around}.")]
        rest = [(name, stored) for name in names if not name.startswith(f"{around}.")]
        rules = [(inner, tiled), *parts, (around, recomputed), *rest]
    for word in draw(st.lists(st.sampled_from(INNER), max_size=2, unique=True)):
        rules.insert(bool(tiled and pairs), (f"{draw(st.sampled_from(['*', *list(modules)[1:]]))}/{word}", stored))
    rules.append(("*", stored))
    return "; ".join(f"{pattern} : {draw(st.sampled_from(decisions))}" for pattern, decisions in rules)


def arguments_of(drawn: dict[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Return arguments of ActivationStore from `min_bytes`, `window`, `when_full`, `host_budget` and `verify`."""
    window = Window(drawn.get("window"), drawn.get("when_full", "wait"))
    return {
        "min_bytes": drawn["min_bytes"],
        "tiers": [Host(drawn.get("host_budget")), Disk(folder), window],
        "observe": [Verify()] if "verify" in drawn else [],
    }


def train(
    model: nn.Module,
    store: ActivationStore | None,
    way: str,
    dtype: torch.dtype,
    autocast: bool,
    *,
    around: Callable[[], Any] = nullcontext,
    device: str = "cpu",
    tokens: int = 4,
    tiles: int | None = None,
) -> list[Any]:
    """Two steps; losses, gradients, parameters, buffers, whether these are new, and how far the random numbers are.

    With `tiles`, the model and its loss are a function that runs on as many slices.
    """
    torch.manual_seed(1)
    random.seed(1)
    own = [*model.buffers()]
    found: list[Any] = []
    for _ in range(2):
        outer = nullcontext if way == OTHER_HOOKS and store is None else AROUND.get(way, nullcontext)
        with outer(), around():
            try:
                found += step(model, store, way, dtype, autocast, device, tokens, tiles)
            finally:
                watched = [grad for part in model.modules() if isinstance(part, Watched) for grad in part.gradients()]
        found += watched
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
    found += [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    # A second run has copies of statistics, which have the same values once it has updated them.
    found.append(torch.tensor([all(each is not one for one in own) for each in model.buffers()]))
    random_states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]
    return [*found, *random_states, torch.tensor(random.random())]


def step(
    model: nn.Module,
    store: ActivationStore | None,
    way: str,
    dtype: torch.dtype,
    autocast: bool,
    device: str,
    tokens: int,
    tiles: int | None,
) -> list[Any]:
    """The losses, and the gradients of the inputs; those of the parameters are theirs afterwards."""
    inputs: list[Tensor] = []
    losses: list[Tensor] = []
    found: list[Any] = []
    run = on_a_thread if way == "on threads" else lambda work: work()

    def total(x: Tensor) -> Tensor:
        return model(x).square().sum() / 100

    def forward() -> None:
        x = torch.randn(2, tokens, WIDTH, dtype=dtype, device=device, requires_grad=way != "fixed input")
        given = forward_ad.make_dual(x, x.detach().cos()) if way == DUAL else x
        with (
            store or nullcontext(),
            torch.autocast(device, torch.bfloat16) if autocast else nullcontext(),
        ):
            if tiles is None:
                loss = model(given).float().square().mean() if tokens == 4 else total(given)
            else:
                loss = tile(total, tiles=tiles)(given)
            if way in INSIDE:
                found.extend(backward(way, [loss], [*model.parameters(), x]))
        inputs.append(x)
        losses.append(loss)

    for _ in range(2 if way == "two at once" else 1):
        run(forward)
    if way not in INSIDE:
        run(lambda: found.extend(backward(way, losses, [*model.parameters(), *inputs])))
    return [*(loss.detach() for loss in losses), *found, *(x.grad for x in inputs)]


def on_a_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(work).result()


def backward(way: str, losses: list[Tensor], tensors: list[Tensor]) -> list[Any]:
    """Give `tensors` their gradients. Returns what else came of it."""
    tensors = [tensor for tensor in tensors if tensor.requires_grad]
    found: list[Any] = []
    for loss in reversed([loss for loss in losses if loss.requires_grad]):
        if way == "retained":
            loss.backward(retain_graph=True)
        if way.startswith("differentiated twice"):
            grads = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
            loss = sum((g.square().sum() for g in grads if g is not None and g.requires_grad), torch.zeros(()))
            if not loss.requires_grad:
                continue
        if way in ("of some", BATCHED, DUAL):
            some = tensors[::2] if way == "of some" else tensors
            ones = torch.tensor([1.0, -2.0, 0.5], device=loss.device) if way == BATCHED else None
            grads = torch.autograd.grad(loss, some, ones, allow_unused=True, is_grads_batched=way == BATCHED)
            for tensor, grad in zip(some, grads, strict=True):
                if way == DUAL and grad is not None:
                    grad, tangent = forward_ad.unpack_dual(grad)
                    found.append(tangent)
                tensor.grad = grad.sum(0) if way == BATCHED and grad is not None else grad
        elif way == "into some":
            loss.backward(inputs=tensors[::2])
        else:
            loss.backward()
    return found
