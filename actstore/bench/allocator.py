"""Bytes that are in use, by what allocates them: one measure for every row, whatever keeps the memory."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from actstore.devices import cpu_memory

PROBE_NBYTES = 1 << 20
HEAP_NBYTES = 4096  # more than looking at the heap takes there, or gives back: some hundred bytes


_maps: WeakSet[mmap.mmap] = WeakSet()


class _Map(mmap.mmap):
    """A map that is counted while it lives."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Map:
        made = super().__new__(cls, *args, **kwargs)
        _maps.add(made)
        return made


def count_maps() -> None:
    """Count, from now on, the memory maps that Python code makes. For a process of the benchmark only."""
    mmap.mmap = _Map  # type: ignore[misc]


def in_use(device: str) -> Callable[[], int] | None:
    """A function that tells the bytes in use; None where the system cannot tell.

    On a GPU, what PyTorch's allocator has given out. On the CPU, what the C allocator has, which is where tensors come
    from and whatever else a row makes, pages of actstore, and memory maps since `count_maps`. Tensors that are shared
    between views, kept in caches or by compiled code are counted like all others, each once.
    """
    if torch.device(device).type == "cuda":
        return partial(torch.cuda.memory_allocated, device)

    def host() -> int:
        return cpu_memory.heap()[0] + sum(map(len, list(_maps))) + cpu_memory.pages_bytes()

    before = host()
    probe = torch.empty(PROBE_NBYTES, dtype=torch.uint8)
    seen = host() - before
    is_told = PROBE_NBYTES - HEAP_NBYTES <= seen < 2 * PROBE_NBYTES  # another allocator may stand in for malloc
    del probe
    return host if is_told else None


def _collect() -> None:
    """Collect garbage until none is found: what only an autograd node holds is seen when that node is gone."""
    while gc.collect():
        pass


class Held:
    """Bytes that a forward leaves behind: those in use when backward begins, less those in use when all is let go.

    Attributes
    ----------
    nbytes : the difference, after `release`; None where it cannot be had
    """

    def __init__(self, device: str) -> None:
        self._in_use = in_use(device)
        self._at_backward: int | None = None
        self.nbytes: int | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Forward and backward inside; the first backward marks the end of forward, whoever calls it."""
        _collect()  # what earlier steps left in cycles is not this one's
        backward, grad = torch.autograd.backward, torch.autograd.grad

        def marked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._at_backward is None and self._in_use is not None:
                self._at_backward = self._in_use()
            return function(*args, **kwargs)

        torch.autograd.backward, torch.autograd.grad = partial(marked, backward), partial(marked, grad)
        try:
            yield
        finally:
            torch.autograd.backward, torch.autograd.grad = backward, grad

    def release(self) -> None:
        """To be called when gradients and everything of the row, but not the model, are let go."""
        _collect()
        if self._at_backward is not None and self._in_use is not None:
            self.nbytes = max(0, self._at_backward - self._in_use())
