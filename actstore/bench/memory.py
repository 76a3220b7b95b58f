"""Memory that a row of the benchmark holds, and its peaks: of the process, of the allocators and of the GPU."""

from __future__ import annotations

import gc
import importlib._bootstrap
import mmap
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from actstore.codecs import dispatch
from actstore.devices import cpu_memory
from actstore.session.process import status_bytes

_CLEAR_REFS = Path("/proc/self/clear_refs")


def rss_bytes() -> int:
    """Return the resident memory of this process; its high-water mark where the system does not tell."""
    now = status_bytes().get("VmRSS")
    return peak_rss_bytes() if now is None else now


def peak_rss_bytes() -> int:
    """Return the high-water mark of this process's resident memory."""
    peak = status_bytes().get("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


class PeakMeter:
    """High-water mark since `reset`.

    Attributes
    ----------
    since_reset : False where the system refused to reset the high-water mark of the process, which then includes
        what came before `reset`
    """

    def __init__(self, device: str) -> None:
        self._cuda = torch.device(device) if torch.device(device).type == "cuda" else None
        self.since_reset = False
        if self._cuda is None:
            cpu_memory.count()

    def reset(self) -> None:
        """Reset the high-water mark."""
        try:
            _CLEAR_REFS.write_text("5")  # proc(5): resets VmHWM to the current resident memory
            self.since_reset = True
        except OSError:
            self.since_reset = False
        cpu_memory.reset_peak()
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)

    def now_bytes(self) -> int:
        """Return the bytes that the GPU's allocator has given out; on the CPU the resident memory of the process."""
        return rss_bytes() if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    def peak_bytes(self) -> int:
        """Return the high-water mark of `now_bytes`."""
        return peak_rss_bytes() if self._cuda is None else torch.cuda.max_memory_allocated(self._cuda)

    def allocated_peak_bytes(self) -> int | None:
        """Return the high-water mark of allocated tensor memory; None on a CPU that cannot count it."""
        return cpu_memory.max_memory_allocated() if self._cuda is None else self.peak_bytes()

    def host_peak_bytes(self) -> int:
        """Return the high-water mark of the process, on any device."""
        return peak_rss_bytes()


class Libraries:
    """Count of the resident memory that libraries add inside: modules that are imported, and kernels that are loaded.

    For a process of the benchmark, in which no other thread imports.

    Attributes
    ----------
    nbytes : growth of the resident memory over all imports and loads so far
    """

    _PLACES: tuple[tuple[Any, str], ...] = ((importlib._bootstrap, "_find_and_load"), (dispatch, "find_kernels"))

    def __init__(self) -> None:
        self.nbytes = 0
        self._outermost = True

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count inside. A module that is already imported costs nothing more than before."""
        functions = [getattr(place, name) for place, name in self._PLACES]
        for (place, name), function in zip(self._PLACES, functions, strict=True):
            setattr(place, name, partial(self._load, function))
        try:
            yield
        finally:
            for (place, name), function in zip(self._PLACES, functions, strict=True):
                setattr(place, name, function)

    def _load(self, function: Callable[..., Any], *args: Any) -> Any:
        if not self._outermost:
            return function(*args)
        self._outermost, before = False, rss_bytes()
        try:
            return function(*args)
        finally:
            self._outermost = True
            self.nbytes += max(0, rss_bytes() - before)


PROBE_NBYTES = 1 << 20
HEAP_NBYTES = 4096  # margin for what `heap` itself allocates or frees, some hundred bytes


_maps: WeakSet[mmap.mmap] = WeakSet()


class _Map(mmap.mmap):
    """A memory map that `in_use` counts while it lives."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Map:
        made = super().__new__(cls, *args, **kwargs)
        _maps.add(made)
        return made


def count_maps() -> None:
    """Count the memory maps that Python code makes from now on. For a process of the benchmark only."""
    mmap.mmap = _Map  # type: ignore[misc]


def in_use(device: str) -> Callable[[], int] | None:
    """Return a function that reads the bytes in use; None where the system cannot tell.

    On a GPU it reads what PyTorch's allocator has given out. On the CPU it adds up the C heap, which holds tensors
    and everything else that a row allocates, the pages of actstore's allocator, and memory maps since `count_maps`. A
    tensor counts once, also where views share it, a cache keeps it, or compiled code allocates it.
    """
    if torch.device(device).type == "cuda":
        return partial(torch.cuda.memory_allocated, device)

    def host() -> int:
        return cpu_memory.heap()[0] + sum(map(len, list(_maps))) + cpu_memory.pages_bytes()

    before = host()
    probe = torch.empty(PROBE_NBYTES, dtype=torch.uint8)
    seen = host() - before
    is_told = PROBE_NBYTES - HEAP_NBYTES <= seen < 2 * PROBE_NBYTES  # False where another allocator replaces malloc
    del probe
    return host if is_told else None


def _collect() -> None:
    """Collect garbage until none is found: a tensor that only an autograd node holds is freed with that node."""
    while gc.collect():
        pass


class Held:
    """Bytes that a forward leaves behind: those in use when backward begins, less those in use after `release`.

    Attributes
    ----------
    nbytes : the difference, after `release`; None where the system cannot tell
    """

    def __init__(self, device: str) -> None:
        self._in_use = in_use(device)
        self._at_backward: int | None = None
        self.nbytes: int | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Run forward and backward inside; the first call of autograd's backward marks the end of forward."""
        _collect()  # earlier steps may have left cycles
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
        """Take the final measure. The caller has freed the gradients and everything of the row but the model."""
        _collect()
        if self._at_backward is not None and self._in_use is not None:
            self.nbytes = max(0, self._at_backward - self._in_use())
