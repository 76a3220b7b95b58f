"""Names of modules that were compiled by ``module.compile()``, and saves of compiled regions.

The hooks of such a module are compiled with it, and compiled hooks cannot tell the name of a module. While a store is
active, the compiled call is therefore wrapped. A copy or a pickle of a module leaves its compiled call out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

from torch.nn import Module

from actstore.autograd.modules import after_call, before_call
from actstore.base.call_site import applied
from actstore.base.compiler import tell_compiler

_lock = Lock()
_GRAPHS = "actstore.compiled.region"


def region_saves() -> bool:
    """Return whether the calling saved-tensor hook runs for a compiled region, which is one autograd function."""
    frame: Any = sys._getframe(1)
    while frame is not None and (name := frame.f_globals.get("__name__", "")).startswith("actstore."):
        if name == _GRAPHS:
            return False  # an input of a region whose own tensors are known
        frame = frame.f_back
    function = None if frame is None else applied(frame)
    return function is not None and function.__name__ == "CompiledFunction"


class NamedCall:
    """The compiled call of a module, with the tracker's hooks around it. All active stores share it."""

    def __init__(self, module: Module, call: Callable[..., Any]) -> None:
        self.call = call
        self.module = module
        self.users = set[object]()  # the entries that need the names
        self.watches: list[CallWatch] = []

    def watch(self, before: Callable[..., None], after: Callable[..., None]) -> CallWatch:
        """Register two functions that run before and after the compiled call, outside of the compiled code."""
        watch = CallWatch(self, before, after)
        self.watches.append(watch)
        return watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watches = self.watches[:]
        for watch in watches:
            watch.before(self.module, args)
        before_call(self.module, args)
        output = None
        try:
            output = self.call(*args, **kwargs)
        finally:
            after_call(self.module, args, output)
            for watch in watches:
                watch.after(self.module, args, output)
        return output


class CallWatch:
    """Two functions around a compiled call, until `remove`."""

    def __init__(self, named: NamedCall, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._named = named
        self.before = before
        self.after = after

    def remove(self) -> None:
        self._named.watches.remove(self)


def wrap(modules: Iterable[Module], user: object, wrapped: list[NamedCall]) -> None:
    """Wrap the calls of the compiled modules, and append them to `wrapped`; `unwrap` removes them."""
    with _lock:
        tell_compiler()
        for module in modules:
            call: Any = module._compiled_call_impl
            if call is None:
                continue
            named = call if isinstance(call, NamedCall) else NamedCall(module, call)
            wrapped.append(named)
            named.users.add(user)
            module.__dict__["_compiled_call_impl"] = named


def unwrap(wrapped: list[NamedCall], user: object) -> None:
    """Restore the modules' own calls, unless another entry still needs the names or the module was compiled anew."""
    with _lock:
        for named in wrapped:
            named.users.discard(user)
            if not named.users and named.module.__dict__.get("_compiled_call_impl") is named:
                named.module.__dict__["_compiled_call_impl"] = named.call
        wrapped.clear()
