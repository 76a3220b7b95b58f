"""English text that every Python carries: its help topics, character by character."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

from actstore.bench.workloads.workload import Workload
from actstore.errors import ConfigError


@lru_cache(maxsize=1)
def text() -> str:
    """Return all help topics of Python, joined in the order of their names."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """Return the characters of the text, in the order of their code points."""
    return tuple(sorted(set(text())))


def text_digest() -> str:
    """Return the first 12 hex digits of the text's SHA-256; the text differs between versions of Python."""
    return hashlib.sha256(text().encode()).hexdigest()[:12]


def check(work: Workload) -> None:
    """Raise ConfigError where the context is longer than the text."""
    if work.context >= len(text()):
        raise ConfigError(f"--context {work.context} is longer than the text, which has {len(text())} characters.")


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
