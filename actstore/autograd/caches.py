"""Results that the model's own selective checkpoints cache, counted and moved by the rules of their modules.

PyTorch shows these tensors to no hook. In forward one of its modes puts what an operator returns into an object, and in
backward another mode gets it from there. Both do so here as before; between the two the tensor is in the store.
"""

from __future__ import annotations

import inspect
import warnings
from threading import Lock, local
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint as torch_checkpoints
from torch import Tensor
from torch._C import _current_graph_task_id
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from actstore.autograd.composite import Composite
from actstore.autograd.deciders import in_recomputation
from actstore.autograd.derived import Derived
from actstore.autograd.handles import Stored
from actstore.autograd.tracker import Frame
from actstore.autograd.unpack import unpack
from actstore.base.caller import stacklevel
from actstore.base.note import CACHED
from actstore.base.tracing import is_traced
from actstore.errors import MutationError

if TYPE_CHECKING:
    from actstore.autograd.hooks import Scope

_torch: Any = torch_checkpoints
_HANDLE, _RUN = "actstore_handle", "actstore_run"  # attributes of PyTorch's objects
_MOVED = Stored | Composite | Derived


class _Followed(local):
    scope: Scope | None = None  # of the innermost entry of a store
    fresh: list[Any] | None = None  # objects that the running operator's results are cached in


_MUTATED = "Tensor cached during selective activation checkpoint has been mutated"  # as PyTorch says it
_thread = _Followed()
_lock = Lock()
_installed = False


class CachingRun:
    """One forward of a selective checkpoint inside of a store.

    A result goes to the store when the next operator begins, as autograd knows it then.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._pack = scope.pack_hook()
        self._keys: Any = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        self._made: tuple[Any, list[Any], Frame] | None = None

    def call(self, mode: Any, operator: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator under the mode, and note what that caches."""
        self.settle()
        before, fresh = _thread.fresh, list[Any]()
        _thread.fresh = fresh
        try:
            result = _dispatch(mode, operator, types, args, kwargs)
        finally:
            _thread.fresh = before
        if fresh:
            self._made = result, fresh, self._scope.tracker.frame
        return result

    def settle(self) -> None:
        """Give the results of the last operator to the store."""
        if self._made is None:
            return
        made, self._made = self._made, None
        result, fresh, frame = made
        leaves = tree_leaves(result)
        with torch._C._ForceDispatchKeyGuard(*self._keys):
            for leaf, entry in zip(leaves, fresh, strict=True):
                if isinstance(leaf, Tensor):
                    with _unseen(leaf), in_recomputation():
                        self._put(leaf, entry, frame)

    def _put(self, tensor: Tensor, entry: Any, frame: Frame) -> None:
        accounts = frame.place.accounts
        if frame.index < len(accounts):  # its precedent may be a tensor that no recomputation reads
            accounts[frame.index].precedent = None
        handle = self._pack_in(frame, tensor)
        setattr(entry, _HANDLE, handle)
        for part in (handle, *getattr(handle, "handles", {}).values()):
            if (account := getattr(part, "account", None)) is not None:
                account.note = account.note._replace(cached=True)
            if self._scope.readers is not None:
                self._scope.readers.set_apart(part, CACHED)
        if isinstance(handle, _MOVED):
            entry.val = None

    def _pack_in(self, outer: Frame, tensor: Tensor) -> Any:
        """Return the handle of a tensor as one that the call `outer` saves, which may have ended."""
        tracker = self._scope.tracker
        tracker.stack.append(tracker.frame)
        tracker.frame = frame = Frame(None, outer.place, None, outer.exact, counted=outer.counted)
        frame.index = outer.index
        if frame.target is None:
            frame.keep_below = 0  # each has a site of its own, which says that it is cached
        try:
            return self._pack(tensor)
        finally:
            outer.index = frame.index
            tracker.pop()


def start(scope: Scope) -> None:
    """Follow the selective checkpoints of this thread for `scope`."""
    _install()
    _thread.scope = scope


def stop(before: Scope | None) -> None:
    """End what `start` began, and restore the scope `before`."""
    _thread.scope = before


def current() -> Scope | None:
    """Return the scope that follows the selective checkpoints of this thread."""
    return _thread.scope


def _enter(mode: Any) -> Any:
    scope = _thread.scope
    if scope is not None and _current_graph_task_id() == -1 and not is_traced():
        if _KNOWN:
            setattr(mode, _RUN, CachingRun(scope))
        else:
            _tell_unknown()
    return _mode_enter(mode)


def _exit(mode: Any, kind: Any, error: Any, trace: Any) -> Any:
    run: CachingRun | None = mode.__dict__.pop(_RUN, None)
    result = _mode_exit(mode, kind, error, trace)
    if run is not None and kind is None:
        run.settle()
    return result


def _call(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    run: CachingRun | None = mode.__dict__.get(_RUN)
    if run is None:
        return _dispatch(mode, func, types, args, kwargs)
    return run.call(mode, func, types, args, kwargs)


def _cache(entry: Any, val: Any) -> None:
    _init(entry, val)
    if _thread.fresh is not None:
        _thread.fresh.append(entry)


def _read(entry: Any, allow_cache_entry_mutation: bool) -> Any:
    handle = entry.__dict__.get(_HANDLE)
    if not isinstance(handle, _MOVED):
        return _get_val(entry, allow_cache_entry_mutation)
    if allow_cache_entry_mutation and isinstance(handle, Stored):
        handle.any_version = True
    with _unseen(handle):
        # As PyTorch does where it caches: otherwise aliases have version counters of their own.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            try:
                tensor = unpack(handle)
            except MutationError as error:
                error.add_context(_MUTATED)
                raise
        return tensor.detach()  # an alias that autograd knows nothing of, as of what an operator returns


def _unseen(what: Any) -> Any:
    """Return a context whose operators no mode sees; those of wrappers need Python all the same."""
    if type(what) in (Tensor, Stored):
        return torch._C._DisableTorchDispatch()
    return _disable_current_modes()


def _names(code: CodeType) -> set[str]:
    """Return the names that a function reads, and functions inside of it."""
    inner = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*inner)


def _is_known() -> bool:
    """Return whether this PyTorch caches tensors in the form that this module knows."""
    wrapper, mode = getattr(_torch, "_VersionWrapper", None), getattr(_torch, "_CachingTorchDispatchMode", None)
    if wrapper is None or mode is None:
        return False
    known = [*inspect.signature(wrapper).parameters] == ["val"]
    known = known and [*inspect.signature(wrapper.get_val).parameters] == ["self", "allow_cache_entry_mutation"]
    return known and "_VersionWrapper" in _names(inspect.unwrap(mode.__torch_dispatch__).__code__)


def _tell_unknown() -> None:
    warnings.warn(
        "what a selective checkpoint caches stays where it is, and reports do not count it: this PyTorch "
        f"({torch.__version__}) caches it in a form that actstore does not know. Use rules in place of the checkpoint: "
        "'blocks.*/@aten.mm : keep; blocks.* : recompute'.",
        RuntimeWarning,
        stacklevel=stacklevel(),
    )


def _install() -> None:
    """Let PyTorch's modes call this module. On threads without a store they do as before."""
    global _installed
    with _lock:
        if _installed or _MODE is None:
            return
        _installed = True
        _MODE.__enter__ = _enter
        if _KNOWN:
            _MODE.__exit__ = _exit
            _MODE.__torch_dispatch__ = _disable_dynamo(_call, recursive=True)
            _torch._VersionWrapper.__init__ = _cache
            _torch._VersionWrapper.get_val = _read


_KNOWN = _is_known()
_MODE: Any = getattr(_torch, "_CachingTorchDispatchMode", None)
_mode_enter: Any = getattr(_MODE, "__enter__", None)
_mode_exit: Any = getattr(_MODE, "__exit__", None)
_dispatch: Any = inspect.unwrap(_MODE.__torch_dispatch__) if _KNOWN else None
_init: Any = _torch._VersionWrapper.__init__ if _KNOWN else None
_get_val: Any = _torch._VersionWrapper.get_val if _KNOWN else None
