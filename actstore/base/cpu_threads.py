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

import torch


def _find_openmp() -> tuple[Callable[[], int], Callable[[int], object]]:
    """Find the functions of the OpenMP runtime that torch uses; those of torch if it uses none that can be found."""
    try:
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        return library.omp_get_max_threads, library.omp_set_num_threads
    except (OSError, AttributeError, StopIteration):
        return torch.get_num_threads, torch.set_num_threads


number, _set_number = _find_openmp()


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
