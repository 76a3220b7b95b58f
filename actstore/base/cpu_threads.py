"""The number of CPU threads of the calling thread, on which the rounding of some operators depends.

A new thread has OpenMP's number, which oneDNN uses, until the first parallel operator gives it the number of
`torch.set_num_threads`; so does `torch.get_num_threads`, which would change what comes after. See
aten/src/ATen/ParallelOpenMP.cpp of PyTorch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, local
from typing import Any, TypeVar

import torch


def find_openmp(function: str) -> Any:
    """Find a function of the OpenMP runtime that torch uses; None if it uses none that can be found."""
    try:
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        return getattr(library, function)
    except (OSError, AttributeError, StopIteration):
        return None


_T = TypeVar("_T")
number: Callable[[], int] = find_openmp("omp_get_max_threads") or torch.get_num_threads


class _State(local):
    is_settled = False  # of this thread


_thread = _State()


def is_settled() -> bool:
    """Return whether the calling thread has the number of `torch.set_num_threads` already.

    Otherwise an operator will give it that number, and a second run of the operators before would have another one.
    """
    if not _thread.is_settled and number() == _elsewhere(torch.get_num_threads):
        settle()
    return _thread.is_settled


def settle() -> None:
    """Give the calling thread the number of `torch.set_num_threads`, as its first parallel operator would."""
    if not _thread.is_settled:
        torch.get_num_threads()
        _thread.is_settled = True


@contextmanager
def using(threads: int) -> Iterator[None]:
    """Let the calling thread use this number of CPU threads; its own number comes back afterwards.

    A new thread has that of torch afterwards, and not OpenMP's: once an operator has run, none gives it torch's.
    """
    settle()
    own, of_torch = number(), _elsewhere(torch.get_num_threads)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(own)
        if own != of_torch:
            _elsewhere(lambda: torch.set_num_threads(of_torch))


def _elsewhere(work: Callable[[], _T]) -> _T:
    """Call `work` on a thread of its own, which has the number of torch then."""
    found = list[_T]()
    thread = Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]
