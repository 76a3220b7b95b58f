"""Calls of operators from a mode's handler, which return what they return without the mode.

PyTorch runs a handler with all keys above Python's excluded. What an operator's kernel calls then runs without
autocast, and takes conjugated views for plain tensors: `torch.linalg.pinv` of complex numbers is wrong. Below a mode
it also chooses other kernels: `torch.max_pool1d` without a gradient has one of its own on a CPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, reduce
from operator import or_
from sys import _getframe
from threading import local
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.autograd.graph import _CloneArgBeforeMutateMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
    _pop_mode_temporarily,
    _push_mode,
)
from torch.utils._pytree import tree_leaves

from actstore.base.call_site import operator_name

_include_set, _exclude_set = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set

_LAZY = DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor
_AUTOCAST = tuple(key for name, key in DispatchKey.__members__.items() if name.startswith("Autocast"))
_VIEWS = DispatchKey.ADInplaceOrView
_COMPOSITION = DispatchKey.CompositeImplicitAutograd
_COMPOSITE = "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"
_ALL = torch._C._dispatch_keyset_full()
_BACKENDS = torch._C._dispatch_keyset_full_after(DispatchKey.Python)
# Operators of PyTorch whose kernels call some that autocast casts for, and the operator that calls them.
_CALLERS = {"aten::_trilinear": "aten::bilinear", "aten::linalg_pinv": "aten::pinverse"}
_PINV = torch.ops.aten.linalg_pinv.atol_rtol_tensor
_POOL = torch.ops.aten.max_pool2d_with_indices.default
_BETWEEN = "actstore.", "torch._compile", "torch._dynamo."  # modules of frames between a handler and what a model calls


class _Composition(local):
    excluded: DispatchKeySet | None = None  # keys, in the composition that runs on this thread


_thread = _Composition()


class OperatorMode(TorchDispatchMode):
    """Mode that sees each operator, also in inference mode: there PyTorch shows compositions, such as a whole LSTM."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _is_composition(operator, args, kwargs or {}):
            return self.call(operator, args, kwargs or {})
        _push_mode(self)
        try:
            return redispatch(operator, args, kwargs or {})
        finally:
            _pop_mode()

    @abstractmethod
    def call(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what an operator returns, or what takes its place."""


def redispatch(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator from the handler of a mode; what its kernel calls runs as without the mode."""
    if _is_composition(operator, args, kwargs):
        with _keys_added(_left(operator)), _as_outermost():
            return operator._op_dk(_COMPOSITION, *args, **kwargs)
    caller = "aten::linalg_pinv" if operator is _PINV and _called() == "pinv" else ""
    keys = _restored(operator, caller)
    if keys is not None:
        with _keys_added(keys):
            return _call(operator, args, kwargs)
    result = _call(operator, args, kwargs)
    if operator is _POOL and _is_max_pool1d(args[0]):
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in result)
    return result


def _call(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator. In a composition, PyTorch's mode for saved tensors that change sees the whole alone."""
    if _thread.excluded is not None and isinstance(_get_current_dispatch_mode(), _CloneArgBeforeMutateMode):
        with _pop_mode_temporarily():  # it refuses tensors of inference mode, and nothing is saved there
            return operator(*args, **kwargs)
    return operator(*args, **kwargs)


@contextmanager
def _keys_added(keys: DispatchKeySet) -> Iterator[None]:
    """Include `keys` where they were included around the outermost operator, or in the composition around this one."""
    excluded = _thread.excluded
    if excluded is None:
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
            excluded = _exclude_set()
    with torch._C._ForceDispatchKeyGuard(_include_set(), _exclude_set() - (keys - excluded)):
        yield


@contextmanager
def _as_outermost() -> Iterator[None]:
    """Let the keys that are excluded now be so for the operators of a composition."""
    before, _thread.excluded = _thread.excluded, _exclude_set()
    try:
        yield
    finally:
        _thread.excluded = before


def _is_composition(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator only calls operators. Some do, but have a kernel for tensors of a few backends."""
    if not _has_composition(operator):
        return False
    backends = {
        (torch._C._dispatch_keys(leaf) & _BACKENDS).highestPriorityTypeId()
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor)
    }
    return not any(_has_kernel(operator.name(), backend) for backend in backends)


def _has_kernel(name: str, key: Any) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    except RuntimeError:  # the dispatcher does not know what tells the sizes of nested tensors
        return False


@cache
def _has_composition(operator: Any) -> bool:
    return isinstance(operator, OpOverload) and _has_kernel(operator.name(), _COMPOSITION.name)


@cache
def _left(operator: OpOverload[..., Any]) -> DispatchKeySet:
    """Return the keys for the operators of a composition: all but those whose kernels have run for the whole."""
    return _ALL - _set_of(key for key in (*_AUTOCAST, _VIEWS) if _has_kernel(operator.name(), key.name))


def _is_max_pool1d(x: Tensor) -> bool:
    """Return whether `torch.max_pool1d` runs, and returns a contiguous tensor without a mode."""
    differentiable = x.requires_grad and torch.is_grad_enabled()
    return x.device.type == "cpu" and x.shape[-2] == 1 and not differentiable and _called() == "max_pool1d"


def _called() -> str:
    """Return the name of the operator that a model calls, where the handler sees only a part of it."""
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
    return reduce(or_, map(DispatchKeySet, keys), _ALL - _ALL)
