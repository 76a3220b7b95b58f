"""The hooks of all modules, which tell a thread's tracker what runs.

Two global module hooks are registered while at least one store is active. Nothing is attached to a model, so that it
can be copied and pickled at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock, local
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from actstore.autograd.tracker import Tracker
from actstore.base.checkpoints import in_checkpoint, in_reentrant
from actstore.base.compiler import tell_compiler
from actstore.base.reaper import Finalizer, Reaper


class GlobalHook:
    """A hook of all modules that comes and goes, always under the same id: compiled code is valid only while the ids
    of such hooks are those that it was compiled with.

    Parameters
    ----------
    register : registers the hook, such as `register_module_forward_hook`
    """

    def __init__(self, register: Callable[..., RemovableHandle], hook: Callable[..., None], **options: Any) -> None:
        self._register = partial(register, hook, **options)
        self._hook = hook
        self._handle: RemovableHandle | None = None

    def add(self) -> None:
        if self._handle is None:
            self._handle = self._register()
            return
        hooks: Any = self._handle.hooks_dict_ref()
        hooks[self._handle.id] = self._hook
        for marks in self._handle.extra_dict_ref:  # such as the ids of hooks that are always called
            marks()[self._handle.id] = True

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()


_active = local()
_lock = Lock()
_trackers = set[Tracker]()  # those that follow modules now, on all threads
_graphs = set[object]()  # one object for each graph whose backward may call compiled modules again, and for each run
_freed = Reaper[object](_lock, _graphs.discard)


def before_call(module: Module, _: Any) -> None:
    """Push the frame of a module that starts to run on this thread."""
    if is_dynamo_compiling():  # compiled code has no modules
        return
    tracker: Tracker | None = getattr(_active, "tracker", None)
    if tracker is None:
        if _freed.queue:
            with _lock:
                _register()
    else:
        weights: Iterable[Any] = module._parameters.values()
        for weight in weights:
            if type(weight) is not Parameter and weight is not None and not isinstance(weight, Parameter):
                tracker.storages.adopt(weight, computed=not weight.is_leaf)
        place = tracker.places.get(module)
        if place is None and "_orig_mod" in module._modules:  # the whole model is compiled: its own hooks may not run
            tell_compiler()
            original: Any = module._modules["_orig_mod"]
            place = tracker.places.get(original)
        if place is not None:
            if place.others:
                place = place.others.get(tracker.frame.place.name, place)
            if not place.name:  # the model itself starts: frames that an interrupt left on the stack are over
                tracker.unwind()
                place.has_run = True
            if place.watched and not in_reentrant():
                place.hidden = in_checkpoint()
                tracker.hidden += place.hidden
            tracker.push(module, place)


def after_call(module: Module, _args: Any, output: Any) -> None:
    """Pop the frame of a module that has run, or failed."""
    if is_dynamo_compiling():
        return
    tracker: Tracker | None = getattr(_active, "tracker", None)
    if tracker is not None:
        if isinstance(module, ParametrizationList) and isinstance(output, Tensor):
            tracker.storages.adopt(output, computed=True)
        elif tracker.returned is not None and type(output) is Tensor:
            tracker.returned(module, output, tracker.frame.place.name)
        tracker.leave(module)
        if tracker.ended is not None and not tracker.stack:
            tracker.ended(output)


_hooks = (
    GlobalHook(register_module_forward_pre_hook, before_call),
    GlobalHook(register_module_forward_hook, after_call, always_call=True),
)


def current() -> Tracker | None:
    """Return the tracker that follows the modules of this thread."""
    tracker: Tracker | None = getattr(_active, "tracker", None)
    return tracker


def start(tracker: Tracker) -> None:
    """Follow the modules of this thread with `tracker`."""
    with _lock:
        _trackers.add(tracker)
        _register()
    _active.tracker = tracker


def stop(tracker: Tracker, before: Tracker | None) -> None:
    """End what `start` began, wherever that was interrupted, and restore the tracker `before`."""
    _active.tracker = before
    with _lock:
        _trackers.discard(tracker)
        _register()


def keep_hooks(owner: object) -> None:
    """Register the hooks of modules after all others, and keep them until `drop_hooks`."""
    with _lock:
        for hook in _hooks:
            hook.remove()
        _graphs.add(owner)
        _register()


def drop_hooks(owner: object) -> None:
    """End what `keep_hooks` began."""
    with _lock:
        _graphs.discard(owner)
        _register()


def lasting(unpack: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Return a copy of an unpack hook. The hooks of modules stay as long as a graph has the copy.

    Code that was compiled with them is valid only while they are there, and backward must run the same code again where
    a checkpoint of the model's own calls a compiled module.
    """
    assert isinstance(unpack, FunctionType)
    copy = FunctionType(unpack.__code__, unpack.__globals__, unpack.__name__, closure=unpack.__closure__)
    graph = object()
    copy.__dict__["graph"] = Finalizer(_freed.put, graph)
    with _lock:
        _graphs.add(graph)
    return copy


def _register() -> None:
    """Register the hooks of modules while a tracker or a graph needs them; the caller owns the lock."""
    _freed.drain_locked()
    for hook in _hooks:
        if _trackers or _graphs:
            hook.add()
        else:
            hook.remove()
