"""Forwards of modules, replaced for as long as something needs it."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Lock
from typing import Any

from torch.nn import Module

_wrapping = Lock()


class ForwardWrapper(ABC):
    """A wrapper of one module's forward.

    It is an attribute of the instance, put there for its first user and taken away after its last one, so that the
    model can be copied and pickled in between.

    Attributes
    ----------
    name : of the module
    users : the entries and runs that need it
    """

    def __init__(self, name: str, module: Module) -> None:
        self.name = name
        self._module = module
        self.users = set[object]()
        self._last: InstanceForward | None = None

    def enter(self, user: object) -> None:
        """Wrap the module's forward, unless it is wrapped already."""
        with _wrapping:
            self.users.add(user)
            own = forward = self._module.__dict__.get("forward")
            while isinstance(forward, InstanceForward):
                if forward.wrapper is self:
                    return
                forward = forward.own
            forward, last = self._module.forward, self._last
            if last is None or last.own is not own or last.forward != forward:
                self._last = last = InstanceForward(self, self._module, forward, own)
            self._module.__dict__["forward"] = last

    def exit(self, user: object) -> None:
        """Restore the module's own forward, as soon as no later store wraps it."""
        with _wrapping:
            self.users.discard(user)
            attributes = self._module.__dict__
            while isinstance(forward := attributes.get("forward"), InstanceForward) and not forward.wrapper.users:
                if forward.own is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = forward.own

    @abstractmethod
    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, or what takes its place."""


def own_forward(attributes: dict[str, Any]) -> Any:
    """Return the forward among a module's attributes, below the wrappers of stores; None for none."""
    forward = attributes.get("forward")
    while isinstance(forward, InstanceForward):
        forward = forward.own
    return forward


class InstanceForward:
    """A module's forward as its wrapper runs it. A copy or a pickle of the module has the module's own forward."""

    def __init__(self, wrapper: ForwardWrapper, module: Module, forward: Callable[..., Any], own: Any) -> None:
        functools.update_wrapper(self, forward)
        self.wrapper = wrapper
        self.own = own  # the instance attribute that was there before, if any
        self._module = module
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper.run(self.forward, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")  # before the copy has a state, this is its class's forward
