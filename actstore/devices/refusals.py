"""Requests that the allocator of a GPU refused, noted by its observer before it raises the error."""

from __future__ import annotations

import logging
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

import torch

log = logging.getLogger("actstore")


class Refusal(NamedTuple):
    """A request for memory that a GPU's allocator refused. All figures are in bytes.

    Attributes
    ----------
    asked : of the request
    total : of the device, or what the process may have of it
    free : of the device
    allocated, reserved : by PyTorch's allocator: in tensors, and in all
    """

    asked: int
    total: int
    free: int
    allocated: int
    reserved: int


_last: dict[int, Refusal] = {}  # by the number of the device; numbers alone, which keep nothing alive
_lock = Lock()
_attached = False


def observe() -> None:
    """Note the refusals of all GPUs from now on. Later calls in the process do nothing."""
    global _attached
    with _lock:
        if _attached:
            return
        _attached = True
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)  # not in a PyTorch for CPUs
        if attach is None:
            return
        try:
            attach(note)
        except RuntimeError as error:  # other allocators than the caching one take no observer
            log.info("refused requests of GPU memory are not noted: %s", error)


def note(device: int, asked: int, total: int, free: int) -> None:
    """Note a refusal. Raises nothing: the allocator would raise it in place of its own error.

    PyTorch calls it with these four numbers, without the allocator's lock.
    """
    allocated = reserved = 0
    with suppress(Exception):
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    _last[device] = Refusal(asked, total, free, allocated, reserved)


def take(device: int) -> Refusal | None:
    """Return the last refusal of a device, and forget it; None without one."""
    return _last.pop(device, None)
