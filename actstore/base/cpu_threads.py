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

import torch


def _find_openmp() -> tuple[Callable[[], int], Callable[[int], object]]:
    """Find the functions of the OpenMP runtime that torch uses; those of torch if it uses none that can be found."""
    try:
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        return library.omp_get_max_threads, library.omp_set_num_threads
    except (OSError, AttributeError, StopIteration):
        return torch.get_num_threads, torch.set_num_threads


number, _set_number = _find_openmp()


class _State(local):
    is_settled = False  # of this thread


_thread = _State()


def is_settled() -> bool:
    """Return whether the calling thread has the number of `torch.set_num_threads` already.

    Otherwise an operator will give it that number, and a second run of the operators before would have another one. The
    number of torch is asked for on a thread of its own, which then has it.
    """
    if not _thread.is_settled:
        found = list[int]()
        asking = Thread(target=lambda: found.append(torch.get_num_threads()))
        asking.start()
        asking.join()
        _thread.is_settled = number() == found[0]
    return _thread.is_settled


@contextmanager
def using(threads: int) -> Iterator[None]:
    """Let the calling thread use this number of CPU threads; its own number comes back afterwards."""
    before, of_torch = number(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(of_torch)
        _set_number(before)
