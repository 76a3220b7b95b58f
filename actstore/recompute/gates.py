"""Gates of ReLU: recorded as one bit an element, and applied to the values of a later run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actstore.base.layout import layout_of
from actstore.errors import KernelUnavailable
from actstore.recompute.choices import PACKED_NUMEL, Choice, Packed, choice_of

if TYPE_CHECKING:
    from actstore.base.reaper import Finalizer


def gate_of(result: Tensor) -> Choice:
    """Return a choice of the elements of a ReLU result that are not 0."""
    kernels = _kernels(result)
    if kernels is None or not layout_of(tuple(result.shape), result.stride()).dense:
        choice: Choice = choice_of(result.bool())
        return choice
    numel = result.numel()
    bits = torch.empty((numel + 7) // 8, dtype=torch.uint8)
    kernels.pack(result, bits, numel)
    return Packed(bits, tuple(result.shape), result.stride())


def let_pass(x: Tensor, choice: Choice, *, in_place: bool) -> Tensor:
    """Return ReLU of `x` with the gates of its first run: above 0 where a gate is open, even if `x` is not; else 0."""
    tiny = torch.finfo(x.dtype).tiny  # a normal number: a processor may flush subnormal numbers to 0
    kernels = _kernels(x)
    if kernels is not None and isinstance(choice, Packed) and choice.stride == x.stride():
        result = x if in_place else torch.empty_like(x)
        kernels.let_pass(choice.bits, x, result, x.numel())
        return result
    passes = choice.read()
    result = x.clamp_min_(tiny) if in_place else x.clamp_min(tiny)
    return result.mul_(passes.view(torch.int8) if type(passes) is Tensor else passes)


def _kernels(x: Tensor) -> Any:
    """Return the compiled kernels for a tensor; None where no kernel serves it."""
    if x.numel() <= PACKED_NUMEL or not x.is_cpu or type(x) is not Tensor:
        return None
    return _compiled(x.dtype)


@cache
def _compiled(dtype: torch.dtype) -> Any:
    try:
        from actstore.kernels.cpu.gates import gates  # needs numba
    except KernelUnavailable:  # the codec of bools warns of it
        return None
    return gates(dtype)


class SharedGate:
    """Gate of a ReLU, read from the stored input of a later call.

    Parameters
    ----------
    handle : the handle of that input
    unpack : the unpack hook of that handle
    hold : books held bytes
    """

    __slots__ = ("_choice", "_handle", "_held", "_hold", "_unpack")

    def __init__(self, handle: Any, unpack: Callable[[Any], Tensor], hold: Callable[[int], Finalizer]) -> None:
        self._handle = handle
        self._unpack = unpack
        self._hold = hold
        self._held: Finalizer | None = None
        self._choice: Choice | None = None

    def settle(self, values: Tensor) -> None:
        """Pack the gate of the input's `values`, so that the payload is no longer needed."""
        if self._choice is None:
            choice = gate_of(values)
            self._held = self._hold(choice.nbytes)
            self._choice, self._handle = choice, None

    def choice(self) -> Choice:
        """Return the gate. Safe from any thread."""
        handle = self._handle
        if handle is not None:  # the later call has not rerun yet
            self.settle(self._unpack(handle))
        assert self._choice is not None
        return self._choice
