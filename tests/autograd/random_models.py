"""Random models: trees of modules that do what models do to autograd, and ways to train them.

A tree is a tuple of a name and its parts, so that hypothesis can draw it and make it smaller. All modules map
(batch, time, WIDTH) to the same shape.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from actstore import tag
from tests.autograd.random_modules import (
    WIDTH,
    Around,
    Attention,
    Call,
    Channels,
    Cubed,
    Doubled,
    Mixed,
    Once,
    Recurrent,
    Scribbling,
    SetUp,
    Shared,
    Subclass,
    Tied,
    UsesNamed,
    Watched,
)

Tree = tuple[Any, ...]


def _filtered(x: Tensor) -> Tensor:
    """Through complex numbers, of which there are none of half precision on a CPU."""
    x = x.float() if x.dtype == torch.bfloat16 else x
    return torch.fft.irfft(torch.fft.rfft(x) * (1 + 2j), n=WIDTH)


def _grad_off(inner: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = inner(x)
    return x * gate + inner(x)


def _grad_on_in_off(inner: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        held = x.detach().exp()
        with torch.enable_grad():
            y = inner(x)
    return y * held


def _halves(inner: nn.Module, x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((inner(torch.cat((b, a), -1))[..., : WIDTH // 2], a.exp()), -1)


def _written(inner: nn.Module, x: Tensor) -> Tensor:
    y = inner(x).clone()
    y[:, 0] *= 2
    return y.mul_(2).relu_()


def _gradient_scaled(inner: nn.Module, x: Tensor) -> Tensor:
    y = inner(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 0.5)
    return y


def _node_hooked(inner: nn.Module, x: Tensor) -> Tensor:
    y = inner(x) * 1
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda grads: tuple(g if g is None else g * 0.5 for g in grads))
        y.grad_fn.register_hook(lambda grads, _: tuple(g if g is None else g.sin() for g in grads))
    return y


def _view_written(x: Tensor) -> Tensor:
    y = x * 1
    y.select(-1, 0).mul_(2)
    y.transpose(1, 2)[:, 2].add_(y.mean())
    y[..., 1:].sigmoid_()
    return y.exp() * y.narrow(1, 0, 1)


def _overwritten(inner: nn.Module, x: Tensor) -> Tensor:
    """What is saved changes, where that is allowed."""
    y = inner(x) * 1
    out = y * y.sigmoid()
    if graph._allow_mutation_on_saved_tensors_enabled:
        with torch.no_grad():
            y.mul_(3)
    return out + y.detach()


def _spoiled(inner: nn.Module, x: Tensor) -> Tensor:
    """What is saved changes, and more is saved afterwards."""
    y = inner(x) * 1
    out = y * y.sigmoid()
    with torch.no_grad():
        y.mul_(3)
    return out.sin() + y.detach()


def _differentiated(inner: nn.Module, x: Tensor) -> Tensor:
    """With its own slope, as a penalty of gradients has it."""
    if not torch.is_grad_enabled():
        return inner(x)
    x = x if x.requires_grad else x.detach().requires_grad_()
    y = inner(x)
    (slope,) = torch.autograd.grad(y.float().sum(), x, create_graph=True, allow_unused=True)
    return y if slope is None else y + slope.sin()


def _by_slope(inner: nn.Module, x: Tensor) -> Tensor:
    """Scaled by its own slope, from a graph that is gone when forward ends."""
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        y = inner(given)
        if not y.requires_grad:
            return x * y
        (slope,) = torch.autograd.grad(y.float().sum(), given, allow_unused=True)
    return x if slope is None else x * slope


def _with_slope(inner: nn.Module, x: Tensor) -> Tensor:
    """Scaled by its own slope, from the graph that backward goes through once more."""
    y = inner(x)
    if not y.requires_grad or not x.requires_grad:
        return y
    (slope,) = torch.autograd.grad(y.float().sum(), x, retain_graph=True, allow_unused=True)
    return y if slope is None else y * slope.detach()


def _read_early(inner: nn.Module, x: Tensor) -> Tensor:
    """Reads what its node has saved, before backward does."""
    y = inner(x).exp()
    saved = getattr(y.grad_fn, "_saved_result", None)  # the node of a subclass is that of an alias
    return y if saved is None else y * saved.detach()


def _in_inference_mode(inner: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        gate = inner(x.detach())
    return x * gate.clone() + inner(x)


def _with_own_hooks(inner: nn.Module, x: Tensor) -> Tensor:
    with graph.saved_tensors_hooks(lambda tensor: [tensor.detach().clone()], lambda packed: packed[0].clone()):
        y = inner(x)
    return y.sin()


def _on_a_thread(inner: nn.Module, x: Tensor) -> Tensor:
    grad = torch.is_grad_enabled()

    def run() -> Tensor:
        with torch.set_grad_enabled(grad):
            return inner(x.float() if x.dtype == torch.bfloat16 else x)

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


def _checkpoint_reentrant(inner: nn.Module, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad", UserWarning)
        return checkpoint(inner, x, use_reentrant=True)


def _checkpoint_selective(inner: nn.Module, x: Tensor) -> Tensor:
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    if any(isinstance(part, nn.GRU) for part in inner.modules()):
        saved = [torch.ops.aten.bmm.default]  # its cells write to products: plain PyTorch would read others again
    contexts = partial(create_selective_checkpoint_contexts, saved)
    return checkpoint(inner, x, use_reentrant=False, context_fn=contexts)


def _computed_weights(inner: nn.Module, x: Tensor) -> Tensor:
    return torch.func.functional_call(inner, {name: p * 1.5 for name, p in inner.named_parameters()}, (x,))


def _stepped_in_backward(inner: nn.Module) -> nn.Module:
    """Each weight is updated as soon as its gradient is there."""

    def step(weight: Tensor) -> None:
        if weight.grad is None:  # the step of a part has taken it
            return
        with torch.no_grad():
            weight.sub_(0.1 * weight.grad)
        weight.grad = None

    for weight in inner.parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(step)
    return Around(inner, lambda inner, x: inner(x))


def _hooked_before(inner: nn.Module) -> nn.Module:
    layer = nn.Sequential(inner, nn.Tanh())
    layer.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,))
    return layer


def _full_precision(inner: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return inner(x.float() if x.dtype == torch.bfloat16 else x)


def _by_value(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x) if bool(x.detach().sum() > 0) else inner(-x) + x


def _hooked(inner: nn.Module) -> nn.Module:
    """With hooks before, behind and in backward, which change what goes through."""
    layer = nn.Sequential(inner, nn.Tanh())
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    layer.register_forward_hook(lambda module, args, out: out + args[0].sin())
    layer.register_full_backward_hook(lambda module, given, out: (None if given[0] is None else given[0] * 0.5,))
    return layer


def _evaluated(inner: nn.Module) -> nn.Module:
    return Around(inner.eval(), lambda inner, x: inner(x))


def _frozen(inner: nn.Module) -> nn.Module:
    return Around(inner.requires_grad_(False), lambda inner, x: inner(x))


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "relu6 in place": lambda: Call(lambda x: F.relu6(x * 1, inplace=True)),
    "leaky relu in place": lambda: Call(lambda x: F.leaky_relu(x * 1, inplace=True)),
    "hardswish in place": lambda: Call(lambda x: F.hardswish(x * 1, inplace=True)),
    "relu in place": lambda: Call(lambda x: F.relu(x * 1, inplace=True)),
    "prelu": nn.PReLU,
    "softmax": lambda: nn.Softmax(-1),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "batch norm": lambda: Channels(nn.BatchNorm1d(WIDTH)),
    "batch norm of all steps": lambda: Channels(nn.BatchNorm1d(WIDTH, momentum=None)),
    "instance norm": lambda: Channels(nn.InstanceNorm1d(WIDTH, affine=True)),
    "convolution": lambda: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "pool": lambda: Channels(nn.MaxPool1d(3, 1, 1)),
    "dropout": lambda: nn.Dropout(0.3),
    "alpha dropout": lambda: nn.AlphaDropout(0.2),
    "feature dropout": lambda: nn.Dropout1d(0.3),
    "noise": lambda: Call(lambda x: x * torch.rand_like(x) + x * random.random()),
    "attention": Attention,
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True),
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "weight norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: orthogonal(nn.Linear(WIDTH, WIDTH)),
    "bilinear": lambda: Around(nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda inner, x: inner(x, x.cos())),
    "embedding": lambda: Around(nn.Embedding(WIDTH, WIDTH), lambda inner, x: x + inner(x.detach().argmax(-1))),
    "sparse embedding": lambda: Around(
        nn.Embedding(WIDTH, WIDTH, sparse=True), lambda inner, x: x + inner(x.detach().argmax(-1))
    ),
    "function": lambda: Call(Cubed.apply),
    "function of one output": lambda: Call(lambda x: SetUp.apply(x)[0]),
    "function of two outputs": lambda: Call(lambda x: torch.add(*SetUp.apply(x))),
    "function of no second order": lambda: Call(lambda x: Once.apply(x)[0]),
    "function that writes": lambda: Call(lambda x: Doubled.apply(x * 1)),
    "function that scribbles": lambda: Call(Scribbling.apply),
    "written views": lambda: Call(_view_written),
    "vmap": lambda: Call(torch.vmap(lambda row: row * row.tanh().cumsum(-1))),
    "jvp": lambda: Call(lambda x: torch.func.jvp(torch.sin, (x,), (x.cos(),))[1]),
    "sorted": lambda: Call(lambda x: x.sort(-1).values * x.topk(1).values),
    "gathered": lambda: Call(
        lambda x: x.index_select(-1, torch.arange(WIDTH - 1, -1, -1, device=x.device))[:, [-1] * x.shape[1]]
    ),
    "spectrum": lambda: Call(_filtered),
    "summed": lambda: Call(lambda x: x.cumsum(1) / (1 + x.logsumexp(-1, keepdim=True).square())),
    "expanded": lambda: Call(lambda x: x * x.mean(-1, keepdim=True).expand_as(x).sin()),
    "marked": lambda: Call(lambda x: tag((x * 2).sin(), "marked").tanh() * x),
    "to a norm of 1": lambda: Call(lambda x: F.normalize(x, dim=-1)),
    "by a power": lambda: Call(lambda x: x * torch.pow(x.square().mean(-1, keepdim=True) + 0.01, -0.5)),
    "by a root": lambda: Call(
        lambda x: x / ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True).add(1e-3).sqrt()
    ),
    "by a sum": lambda: Call(lambda x: x.relu() / (x.relu().sum(-1, keepdim=True) + 1e-3)),
    "by each element": lambda: Call(lambda x: x.sin() / (x.abs() + 0.01)),
    "standardised": lambda: Call(lambda x: (x - x.mean()) / (x.std() + 1)),
}

AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "residual": lambda inner: Around(inner, lambda inner, x: x + inner(x)),
    "named": UsesNamed,
    "shared": Shared,
    "tied": Tied,
    "hooked": _hooked,
    "evaluated": _evaluated,
    "frozen": _frozen,
    "flat": lambda inner: Around(inner, lambda inner, x: inner(x.reshape(-1, 2, WIDTH)).view(x.shape)),
    "twice": lambda inner: Around(inner, lambda inner, x: inner(inner(x))),
    "grad off": lambda inner: Around(inner, _grad_off),
    "grad on in off": lambda inner: Around(inner, _grad_on_in_off),
    "halves": lambda inner: Around(inner, _halves),
    "written": lambda inner: Around(inner, _written),
    "gradient scaled": lambda inner: Around(inner, _gradient_scaled),
    "full precision": lambda inner: Around(inner, _full_precision),
    "by value": lambda inner: Around(inner, _by_value),
    "detached": lambda inner: Around(inner, lambda inner, x: inner(x).detach() * x),
    "marked behind": lambda inner: Around(inner, lambda inner, x: tag(inner(x), "marked").sin() + x),
    "checkpoint": lambda inner: Around(inner, lambda inner, x: checkpoint(inner, x, use_reentrant=False)),
    "checkpoint, reentrant": lambda inner: Around(inner, _checkpoint_reentrant),
    "checkpoint, selective": lambda inner: Around(inner, _checkpoint_selective),
    "watched": Watched,
    "node hooked": lambda inner: Around(inner, _node_hooked),
    "hooked before": _hooked_before,
    "stepped in backward": _stepped_in_backward,
    "overwritten": lambda inner: Around(inner, _overwritten),
    "spoiled": lambda inner: Around(inner, _spoiled),
    "differentiated": lambda inner: Around(inner, _differentiated),
    "by slope": lambda inner: Around(inner, _by_slope),
    "with slope": lambda inner: Around(inner, _with_slope),
    "read early": lambda inner: Around(inner, _read_early),
    "inference mode": lambda inner: Around(inner, _in_inference_mode),
    "own hooks": lambda inner: Around(inner, _with_own_hooks),
    "on a thread": lambda inner: Around(inner, _on_a_thread),
    "computed weights": lambda inner: Around(inner, _computed_weights),
    "subclass": lambda inner: Around(inner, lambda inner, x: inner(x.as_subclass(Subclass)).as_subclass(Tensor)),
}


SEQUENCES: dict[str, type[nn.Sequential]] = {"sequence": nn.Sequential, "mixed": Mixed}


def trees() -> st.SearchStrategy[Tree]:
    """Trees of up to a dozen leaves."""
    return st.recursive(
        st.sampled_from(sorted(LEAVES)).map(lambda name: (name,)),
        lambda inner: (
            st.tuples(st.sampled_from(sorted(AROUND)), inner)
            | st.tuples(st.sampled_from(sorted(SEQUENCES)), st.lists(inner, min_size=2, max_size=5)).map(
                lambda drawn: (drawn[0], *drawn[1])
            )
        ),
        max_leaves=8,
    )


def grow(tree: Tree) -> nn.Module:
    """The module of a tree."""
    name, *parts = tree
    if name in SEQUENCES:
        return SEQUENCES[name](*map(grow, parts))
    return AROUND[name](grow(parts[0])) if parts else LEAVES[name]()


def build(forest: list[Tree], dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    """A sequence of trees within another, the same at every call."""
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Sequential(*map(grow, forest))).to(dtype)
