"""Blocks of an 8B-class Llama, in bfloat16, on the characters of Python's help topics, with adapters if wanted."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from actstore.bench.workloads.llama import adapt
from actstore.bench.workloads.text import text
from benchmarks.gpu.place import Place

LAYERS, VOCABULARY = 32, 128256  # of Llama 3 8B


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model, and of a step: one sequence of `tokens`. With `lora`, only adapters train.

    `vocabulary` is the number of logits of a token; 0 for one logit for each character of the text.
    """

    layers: int = 8
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    tokens: int = 8192
    lora: bool = False
    vocabulary: int = 0

    @classmethod
    def at(cls, place: Place, *, lora: bool = False, **changed: int) -> Sizes:
        """Return the sizes for a scale; with `lora` those of the whole model, as it is fine-tuned."""
        full = cls(layers=LAYERS, vocabulary=VOCABULARY) if lora else cls()
        sizes = place.sized(full, cls(layers=4, width=64, heads=4, kv_heads=2, hidden=192, tokens=64))
        return replace(sizes, lora=lora, **changed)


class Attention(nn.Module):
    """Causal attention with grouped queries and rotary positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.width // sizes.heads
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k = nn.Linear(sizes.width, sizes.kv_heads * self.size, bias=False)
        self.v = nn.Linear(sizes.width, sizes.kv_heads * self.size, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (line(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for line in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        found: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return found


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions: the two halves of a head are real and imaginary parts."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class SwiGLU(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return found


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(sizes.width), Attention(sizes)
        self.norm2, self.mlp = nn.RMSNorm(sizes.width), SwiGLU(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        found: Tensor = x + self.mlp(self.norm2(x))
        return found


class Loss(nn.Module):
    """The last layer and the loss: ``loss(hidden, codes)`` is the mean cross entropy."""

    def __init__(self, sizes: Sizes, codes: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, codes, bias=False)

    def forward(self, hidden: Tensor, codes: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(hidden)).float().flatten(0, 1), codes.flatten())


class Llama(nn.Module):
    """A Llama: ``model(codes)`` is the mean cross entropy of predicting each character from those before it."""

    def __init__(self, sizes: Sizes, codes: int) -> None:
        super().__init__()
        self.size = sizes.width // sizes.heads
        self.embed = nn.Embedding(codes, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.loss = Loss(sizes, codes)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embed(codes[:, :-1])
        with torch.no_grad():
            rates = 5e5 ** -torch.arange(0, 1, 2 / self.size, device=x.device)
            angles = torch.outer(torch.arange(x.shape[1], device=x.device), rates).repeat(1, 2)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        loss: Tensor = self.loss(x, codes[:, 1:])
        return loss


class Job:
    """A model on a device, and one batch. Weights and gradients stay: a step is forward and backward, no optimizer.

    Attributes
    ----------
    blocks : the repeated parts of the model, in order
    about : sizes, for the figures
    parameter_nbytes : bytes of the weights; gradients take as much where all train
    """

    def __init__(self, place: Place, sizes: Sizes) -> None:
        self.place = place
        characters = sorted(set(text()))
        torch.manual_seed(0)
        with torch.device(place.device):
            self.model = Llama(sizes, max(sizes.vocabulary, len(characters))).bfloat16()
            if sizes.lora:
                self.model.requires_grad_(False)
                adapt(self.model.blocks)
                self.model.bfloat16()
        self.about: dict[str, Any] = {"sizes": asdict(sizes)}
        self.blocks = list(self.model.blocks)
        codes = {character: code for code, character in enumerate(characters)}
        self._codes = torch.tensor([codes[character] for character in text()], device=place.device)
        self.parameter_nbytes = sum(p.nbytes for p in self.model.parameters())
        self.resize(sizes.tokens)

    def resize(self, tokens: int) -> None:
        """Change the length of context."""
        self.tokens = tokens
        self.batch = self._codes[: tokens + 1].clone().unsqueeze(0)

    def forward(self) -> Tensor:
        """Return the loss. A GPU uses flash attention, whose backward can be told to be deterministic."""
        flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.place.on_gpu else nullcontext()
        with flash:
            loss: Tensor = self.model(self.batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Run backward; recomputed blocks use the attention of forward."""
        flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.place.on_gpu else nullcontext()
        with flash:
            torch.autograd.backward(loss)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all weights, after a backward."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def step(self, context: AbstractContextManager[object]) -> None:
        """Run forward within `context`, and backward outside of it."""
        self.model.zero_grad(set_to_none=True)
        with context:
            loss = self.forward()
        self.backward(loss)


def deterministic(*, warn_only: bool = False) -> None:
    """Make two runs of a step bit-identical; with `warn_only` where PyTorch can."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS adds in one order only with this
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # otherwise PyTorch fills each fresh buffer, and the store writes it again
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
