"""Models with a recomputed region whose inputs come back with an error, and their gradients."""

import torch
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore

KEPT, ANEW = "int4", "int4, decisions=anew"


class Region(nn.Module):
    """``model(x)`` runs `function` on what a layer has made of x; int4 moves that by up to 7 %."""

    def __init__(self, function, **parts):
        super().__init__()
        self.inner = Inner(function)
        for name, part in parts.items():
            setattr(self.inner, name, part)

    def forward(self, x):
        return self.inner(x * 1)


class Inner(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def store_of(model, inputs, **options):
    return ActivationStore(model, f"inner : recompute({inputs})", min_bytes=0, **options)


def gradients(model, x, store=None, weigh=None):
    """The gradients of x and of all parameters; the loss weighs each output with a fixed random number."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    model.zero_grad()
    if store is None:
        y = model(x)
    else:
        with store:
            y = model(x)
    torch.manual_seed(5)
    y.backward(torch.randn(y.shape).to(y.dtype) if weigh is None else weigh(y))
    return [x.grad, *(p.grad for p in model.parameters())]


def batch(dtype=torch.float32, seed=0, shape=(4, 6, 8, 8)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(x):
    """Some elements equal each other and the points at which operators decide."""
    return (2 * x).round() / 2 + torch.where(x.abs() > 2, 0.01 * x, 0)


class Deep(nn.Module):
    """Blocks of linear layers and ReLU: the gradients of x and of biases depend on masks and weights alone."""

    def __init__(self, blocks=5, inplace=True):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace), nn.Linear(32, 16), nn.ReLU(inplace))
            for _ in range(blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def notes(store):
    return [site.note for site in store.report().sites if "decisions" in (site.note or "")]


def of_masks(model, found):
    return [found[0], *(g for (name, _), g in zip(model.named_parameters(), found[1:], strict=True) if "bias" in name)]


class Runs(list):
    """A note of each run of a module, second runs too. A store has only lists of their own class put back."""


class Routed(nn.Module):
    """A mixture of experts. `by_index` gathers the tokens of each expert, and otherwise all experts see all tokens."""

    def __init__(self, by_index, noise=None):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.gate = nn.LayerNorm(16), nn.Linear(16, 8, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(8))
        self.by_index, self.noise, self.chosen = by_index, noise, Runs()

    def forward(self, x):
        h = self.norm(x)
        logits = self.gate(h)
        if self.noise is not None:
            logits = logits + torch.randn(logits.shape, generator=self.noise[0])
        weights, chosen = logits.softmax(-1).topk(2)
        self.chosen.append(chosen.clone())
        if not self.by_index:
            share = (F.one_hot(chosen, 8) * weights[..., None]).sum(1)
            return x + torch.einsum("te,etd->td", share, torch.stack([expert(h) for expert in self.experts]))
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out.index_add_(0, token, expert(h[token]) * weights[token, slot, None])
        return x + out


class Mixture(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.blocks = nn.ModuleList(Routed(*args) for _ in range(3))

    def forward(self, x):
        x = x * 1
        for block in self.blocks:
            x = block(x)
        return x


def error_of(found, wanted):
    squares = [((a - b).square().sum(), b.square().sum()) for a, b in zip(found, wanted, strict=True)]
    return (sum(a for a, _ in squares) / sum(b for _, b in squares)).sqrt().item()


def rerouted(model):
    """Tokens whose experts differ between the two runs."""
    return sum((first != second).any(-1).sum().item() for first, second in (block.chosen for block in model.blocks))
