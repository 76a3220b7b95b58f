"""Calls of operators from a mode's handler, which return what they return without the mode.

PyTorch runs a handler with all keys above Python's excluded. What an operator's kernel calls then runs without
autocast, and takes conjugated views for plain tensors: `torch.linalg.pinv` of complex numbers is wrong. Below a mode
it also chooses other kernels: `torch.max_pool1d` without a gradient has one of its own on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, reduce
from operator import or_
from sys import _getframe
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

from actstore.base.called import operator_name

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_include_set, _exclude_set = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set

_LAZY = DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor
_AUTOCAST = tuple(key for name, key in DispatchKey.__members__.items() if name.startswith("Autocast"))
_COMPOSITE = "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"
# Operators of PyTorch whose kernels call some that autocast casts for, and the operator that calls them.
_CALLERS = {"aten::_trilinear": "aten::bilinear", "aten::linalg_pinv": "aten::pinverse"}
_PINV = torch.ops.aten.linalg_pinv.atol_rtol_tensor
_POOL = torch.ops.aten.max_pool2d_with_indices.default
_BETWEEN = "actstore.", "torch._compile", "torch._dynamo."  # modules of frames between a handler and what a model calls


def redispatch(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator from the handler of a mode; what its kernel calls runs as without the mode."""
    caller = "aten::linalg_pinv" if operator is _PINV and _called() == "pinv" else ""
    keys = _restored(operator, caller)
    if keys is None:
        result = operator(*args, **kwargs)
        if operator is _POOL and _is_max_pool1d(args[0]):
            return tuple(part.clone(memory_format=torch.contiguous_format) for part in result)
        return result
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # the state around the outermost operator
        keys = keys - _exclude_set()
    with torch._C._ForceDispatchKeyGuard(_include_set(), _exclude_set() - keys):
        return operator(*args, **kwargs)


def _is_max_pool1d(x: Tensor) -> bool:
    """Return whether `torch.max_pool1d` runs, and returns a contiguous tensor without a mode."""
    return x.device.type == "cpu" and x.shape[-2] == 1 and not x.requires_grad and _called() == "max_pool1d"


def _called() -> str:
    """Return the name of the operator that a model calls, and of which the handler sees a part."""
    frame: FrameType | None = _getframe(1)
    while frame is not None and _is_between(frame):
        frame = frame.f_back
    return "" if frame is None else operator_name(frame)


def _is_between(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__torch_dispatch__" or frame.f_globals.get("__name__", "").startswith(_BETWEEN)


@cache
def _restored(operator: Any, caller: str) -> DispatchKeySet | None:
    """Return the keys that the kernel of an operator may need; None for a kernel that calls no operators.

    caller : the operator that it is part of; empty for the usual one
    """
    if not isinstance(operator, OpOverload):
        return None
    name, keys = operator.name(), [*_LAZY]
    if operator.namespace not in ("aten", "prim", "prims"):
        keys += [key for key in _AUTOCAST if not _has_kernel(name, key.name)]
    elif not any(_has_kernel(name, key) for key in _COMPOSITE) or _has_kernel(name, "CPU"):
        return None
    elif caller := caller or _CALLERS.get(operator._schema.name, ""):  # autocast is off inside of what it casts for
        keys += [key for key in _AUTOCAST if not _has_kernel(caller, key.name)]
    return _set_of(keys)


def _set_of(keys: Iterable[DispatchKey]) -> DispatchKeySet:
    return reduce(or_, map(DispatchKeySet, keys))
