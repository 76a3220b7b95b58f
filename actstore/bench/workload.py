"""What the benchmark trains: a small GPT on English text that every Python carries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actstore.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Workload:
    """Sizes, device and seed of the training run; everything else about it is fixed.

    Attributes
    ----------
    layers, width, heads : of the GPT
    context : characters that it sees at once
    batch : sequences in a step
    steps : timed steps, after `warmup` steps that train but are not timed
    dropout : probability, in the attention and after each half of a block
    dtype : float32, or bfloat16 | float16 by autocast over a model in float32
    device : cpu, cuda, or cuda:<index>
    threads : of torch, on the CPU; 0 takes one for each core that this process may use
    """

    layers: int = 6
    width: int = 256
    heads: int = 4
    context: int = 256
    batch: int = 8
    steps: int = 6
    warmup: int = 2
    dropout: float = 0.0
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "batch", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)} is too small; give 1 or more")
        if self.warmup < 0 or self.threads < 0:
            raise ConfigError(f"--warmup {self.warmup} and --threads {self.threads} must not be negative")
        if self.width % self.heads:
            raise ConfigError(
                f"--heads {self.heads} does not divide --width {self.width}; choose a divisor of the width"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"--dropout {self.dropout} is not a probability; give 0 or more and less than 1")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.context >= len(text()):
            raise ConfigError(f"--context {self.context} is longer than the text, which has {len(text())} characters")

    @property
    def device_type(self) -> str:
        return torch.device(self.device).type

    @property
    def on_cuda(self) -> bool:
        return self.device_type == "cuda"

    def check_device(self) -> None:
        """Raise ConfigError unless this machine has the device."""
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError(f"--device {self.device!r} is not a device; give cpu, cuda or cuda:0") from error
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"--device {self.device!r}: the benchmark knows cpu and cuda")
        count = torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= count:
            raise ConfigError(f"--device {self.device!r}: torch sees {count} CUDA devices here; give --device cpu")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Workload:
        return cls(**{field.name: values[field.name] for field in fields(cls)})


@lru_cache(maxsize=1)
def text() -> str:
    """All help topics of Python, joined in the order of their names."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """The characters of the text, in the order of their code points."""
    return tuple(sorted(set(text())))


def text_digest() -> str:
    """Names the text, which differs between versions of Python: the first 12 hex digits of its SHA-256."""
    return hashlib.sha256(text().encode()).hexdigest()[:12]


class Batches:
    """Batches by step number, the same for every row.

    ``batches(step)`` returns characters and the characters after them, both (batch, context) int64 on the device.
    """

    def __init__(self, work: Workload) -> None:
        codes = {character: code for code, character in enumerate(vocabulary())}
        self._data = torch.tensor([codes[character] for character in text()])
        self._work = work

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        work = self._work
        generator = torch.Generator().manual_seed(work.seed * 1_000_003 + step)
        starts = torch.randint(len(self._data) - work.context, (work.batch, 1), generator=generator)
        index = starts + torch.arange(work.context)
        return self._data[index].to(work.device), self._data[index + 1].to(work.device)


class Attention(nn.Module):
    """Causal self-attention with one projection for query, key and value."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.heads, self.dropout = work.heads, work.dropout
        self.qkv = nn.Linear(work.width, 3 * work.width)
        self.proj = nn.Linear(work.width, work.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(work.width)
        self.attn = Attention(work)
        self.norm2 = nn.LayerNorm(work.width)
        self.mlp = nn.Sequential(
            nn.Linear(work.width, 4 * work.width), nn.GELU(), nn.Linear(4 * work.width, work.width)
        )
        self.drop: Callable[[Tensor], Tensor] = nn.Dropout(work.dropout) if work.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """``model(x, y)`` is the mean cross entropy of predicting the characters `y` after `x`."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(vocabulary()), work.width)
        self.positions = nn.Embedding(work.context, work.width)
        self.blocks = nn.ModuleList(Block(work) for _ in range(work.layers))
        self.norm = nn.LayerNorm(work.width)
        self.head = nn.Linear(work.width, len(vocabulary()), bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.characters(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def build(work: Workload) -> GPT:
    """The model as the seed makes it, the same numbers on every device."""
    torch.manual_seed(work.seed)
    return GPT(work).to(work.device)


def autocast(work: Workload) -> AbstractContextManager[Any]:
    """The precision of forward: nothing for float32, autocast for the 16-bit dtypes."""
    dtype = DTYPES[work.dtype]
    return torch.autocast(work.device_type, dtype=dtype, enabled=dtype != torch.float32)
